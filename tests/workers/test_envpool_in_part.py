"""An EnvPool that answers with only its ready envs: no step is lost, and none is delivered twice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from headrace.schemas.accounts.ledger import Discard
from headrace.schemas.chunks.chunk import ChunkEnd, EpisodeChunk, to_episode
from headrace.schemas.errors import EnvRestartBudgetError
from headrace.workers import EnvContext, RunnerCallback
from support.envs.toy import check_books, runner

envpool = pytest.importorskip("envpool", reason="envpool is not installed; pip install 'headrace[envpool]'")

# Its spaces have bounds of float64, which gymnasium says it narrows.
pytestmark = pytest.mark.filterwarnings("ignore:.*precision lowered by casting:UserWarning")

NUM_ENVS = 5


def _make(context: EnvContext) -> Any:
    return envpool.make_gymnasium("CartPole-v1", num_envs=context.num_envs, **context)


def _runner(batch_size: int = 3, env: Any = _make, **settings: Any) -> Any:
    config = {"seed": 3, "batch_size": batch_size}
    return runner(env, num_envs=NUM_ENVS, env_config=config, **{"rollout_fragment_length": 20, **settings})


def _check_true(chunks: Iterable[EpisodeChunk]) -> dict[str, list[EpisodeChunk]]:
    """By episode. A cart's place changes by its speed, so that a step left out or told twice would show."""
    parts: dict[str, list[EpisodeChunk]] = defaultdict(list)
    for chunk in chunks:
        parts[chunk.episode_id].append(chunk)
        assert (chunk.rewards == 1.0).all()
        assert chunk.seed is None
        np.testing.assert_allclose(chunk.obs[1:, 0], chunk.obs[:-1, 0] + 0.02 * chunk.obs[:-1, 1], atol=1e-5)
        if chunk.end is not ChunkEnd.ABORTED:
            over = np.abs(chunk.obs[:, 2]) > 12 * 2 * np.pi / 360
            assert over.nonzero()[0].tolist() == ([len(chunk)] if chunk.end is ChunkEnd.TERMINATED else [])
    for episode in parts.values():
        to_episode(episode)  # which compares what meets at the seams
    return parts


@pytest.mark.parametrize("settings", [{}, {"module": "headrace.workers.modules:lstm_actor_critic"}])
@pytest.mark.parametrize("batch_size", [1, 3, 4])
def test_chunks_of_a_partial_envpool_hold_every_step_once(batch_size: int, settings: dict[str, Any]) -> None:
    with _runner(batch_size, **settings) as sampler:
        chunks = [chunk for _ in range(5) for chunk in sampler.sample_fragment()]
        check_books(sampler)
        assert sampler.totals.stepped == sampler.totals.delivered == sum(map(len, chunks)) >= 5 * NUM_ENVS * 20
        assert sampler.totals.episodes == sum(chunk.end is ChunkEnd.TERMINATED for chunk in chunks) > 5
    assert {chunk.env_index for chunk in chunks} == set(range(NUM_ENVS))
    _check_true(chunks)


@pytest.mark.parametrize("batch_mode", ["truncate_episodes", "complete_episodes"])
def test_every_episode_ends_as_finished_or_aborted_with_correct_chunks(batch_mode: str) -> None:
    with _runner(batch_mode=batch_mode) as sampler:
        chunks = list(sampler.sample_fragment())
        for count in (1, 7):
            whole = sampler.sample(num_episodes=count)
            ends = [chunk.end for chunk in whole if len(chunk)]
            assert set(ends) == {ChunkEnd.TERMINATED}
            assert count <= len(ends) < count + NUM_ENVS
            chunks += whole
        chunks += sampler.sample(num_timesteps=13)
        chunks += sampler.sample(num_timesteps=13, random_actions=True, force_reset=True)
        chunks += sampler.sample(num_timesteps=13, force_reset=True)
        chunks += sampler.discard_open(Discard.SHUTDOWN)
        assert sampler.totals.open == 0
        check_books(sampler)
        sampler.make_env()
        assert all(chunk.t_start == 0 for chunk in sampler.sample(num_timesteps=13))
    ends = {episode: parts[-1].end for episode, parts in _check_true(chunks).items()}
    assert ChunkEnd.ONGOING not in ends.values()


def _spoiling(spoil: Callable[[Any], Any], at: int, lives: int) -> Any:
    """A creator of pools whose nth answer is spoilt, in their first lives."""
    made: list[Any] = []

    def create(context: EnvContext) -> Any:
        pool = _make(context)
        made.append(pool)
        receive, left = pool.recv, [at]

        def recv() -> Any:
            left[0] -= 1
            answer = receive()
            return spoil(answer) if left[0] == 0 and len(made) <= lives else answer

        pool.recv = recv
        return pool

    return create


def _raise(answer: Any) -> Any:
    raise RuntimeError("the pool burst")


def _bad_reward(answer: Any) -> Any:
    return answer[0], answer[1] * np.nan, *answer[2:]


def _outside(answer: Any) -> Any:
    return answer[0] + np.inf, *answer[1:]


@pytest.mark.parametrize("at", [1, 2, 30])
@pytest.mark.parametrize(
    ("spoil", "reason"), [(_raise, "env_exception"), (_bad_reward, "env_bad_data"), (_outside, "env_bad_data")]
)
def test_a_pool_failure_drops_open_episodes_by_reason_and_sampling_resumes(spoil: Any, reason: str, at: int) -> None:
    with _runner(env=_spoiling(spoil, at, lives=1)) as sampler:
        chunks = [chunk for _ in range(4) for chunk in sampler.sample_fragment()]
        check_books(sampler)
        # What begins has no reward yet that could be bad.
        began_well = spoil is _bad_reward and at <= 2
        assert sampler.totals.env_failures == sampler.totals.env_rebuilds == (0 if began_well and at == 1 else 1)
        assert set(sampler.totals.discarded) <= {reason}
    assert {chunk.end_reason for chunk in chunks if chunk.end is ChunkEnd.ABORTED} <= {reason}
    _check_true(chunks)


def test_a_pool_that_always_fails_ends_sampling_with_a_typed_error() -> None:
    with _runner(env=_spoiling(_raise, 3, lives=100), env_restart_attempts=3) as sampler:
        with pytest.raises(EnvRestartBudgetError, match="the pool burst"):
            sampler.sample(num_timesteps=1000)
        assert sampler.totals.env_failures == 4
        check_books(sampler)


class Account(RunnerCallback):
    """A callback that records created, ended and aborted episodes, and raises at the seventh."""

    def __init__(self) -> None:
        self.created: list[str] = []
        self.over: list[str] = []

    def on_episode_created(self, episode: Any, **_: Any) -> None:
        self.created.append(episode.episode_id)
        if len(self.created) == 7:
            raise ValueError("of the callback")

    def on_episode_end(self, episode: Any, **_: Any) -> None:
        self.over.append(episode.episode_id)

    def on_episode_aborted(self, episode: Any, **_: Any) -> None:
        self.over.append(episode.episode_id)


def test_callbacks_get_every_episode_and_an_exception_rebuilds_the_pool() -> None:
    account = Account()
    with _runner(callbacks=[account]) as sampler:
        _check_true(chunk for _ in range(4) for chunk in sampler.sample_fragment())
        check_books(sampler)
        assert set(sampler.totals.discarded) == {"callback_exception"}
        assert (sampler.totals.env_rebuilds, sampler.totals.env_failures) == (1, 0)
        told = account.over + [view.episode_id for view in sampler.running_episodes()]
    assert len(set(told)) == len(told)
    assert set(told) <= set(account.created)
