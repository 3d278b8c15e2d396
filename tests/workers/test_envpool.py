"""EnvPool's vectorised envs are sampled directly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.wrappers.vector import RecordEpisodeStatistics

from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.errors import EnvContractError
from headrace.workers import EnvContext
from support.envs.toy import check_books, runner

pytest.importorskip("envpool", reason="envpool is not installed; pip install 'headrace[envpool]'")

# Its spaces have bounds of float64, which gymnasium says it narrows.
pytestmark = pytest.mark.filterwarnings("ignore:.*precision lowered by casting:UserWarning")


def _make(context: EnvContext) -> Any:
    import envpool

    return envpool.make_gymnasium("CartPole-v1", num_envs=context.num_envs, **context)


def test_chunks_of_an_envpool_hold_every_step_once() -> None:
    with runner(_make, num_envs=5, rollout_fragment_length=40, env_config={"seed": 3}) as sampler:
        batch = [*sampler.sample_fragment(), *sampler.sample_fragment()]
        check_books(sampler)
        assert sampler.totals.stepped == sum(len(chunk) for chunk in batch)
        assert sampler.totals.episodes > 5
    for chunk in batch:
        assert (chunk.rewards == 1.0).all()
        assert chunk.seed is None
        # A cart's place changes by its speed, so that a step left out or told twice would show.
        np.testing.assert_allclose(chunk.obs[1:, 0], chunk.obs[:-1, 0] + 0.02 * chunk.obs[:-1, 1], atol=1e-5)
        over = np.abs(chunk.obs[:, 2]) > 12 * 2 * np.pi / 360
        assert over.nonzero()[0].tolist() == ([len(chunk)] if chunk.end is ChunkEnd.TERMINATED else [])


def test_the_seed_in_the_context_makes_an_envpool_repeatable() -> None:
    def seeded(context: EnvContext) -> Any:
        return _make(EnvContext({"seed": context.seed % 2**31}, num_envs=context.num_envs))  # type: ignore[operator]

    with runner(seeded, num_envs=3) as one, runner(seeded, num_envs=3) as again, runner(seeded, 1, num_envs=3) as other:
        seen = [sampler.sample_fragment().arrays["obs"].tobytes() for sampler in (one, again, other)]
    assert seen[0] == seen[1] != seen[2]


def test_a_time_limit_truncates() -> None:
    with runner(_make, num_envs=2, env_config={"seed": 3, "max_episode_steps": 4}) as sampler:
        batch = sampler.sample(num_episodes=6)
    assert {(len(chunk), chunk.end) for chunk in batch} == {(4, ChunkEnd.TRUNCATED)}


def test_a_wrapped_envpool_with_partial_batches_is_refused() -> None:
    def wrapped(context: EnvContext) -> Any:
        return RecordEpisodeStatistics(_make(context))

    with (
        runner(wrapped, num_envs=4, env_config={"batch_size": 2}, restart_failed_sub_environments=False) as sampler,
        pytest.raises(EnvContractError, match=r"\(2, 4\)|batch_size"),
    ):
        sampler.sample(num_timesteps=4)
