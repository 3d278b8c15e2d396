"""TensorDicts of recorded batches in TorchRL's layout, in its replay buffers, and in its estimator of advantages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from headrace.learner_stub import gae
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.workers import EnvRunnerConfig, SingleAgentEnvRunner

MakeBatch = Callable[..., ChunkBatch]
_REASON = "torchrl is not installed; pip install 'headrace[torchrl]'"
torchrl_data: Any = pytest.importorskip("torchrl.data", reason=_REASON)
to_tensordict: Any = pytest.importorskip("headrace.learner_stub.adapters.tensor_dicts").to_tensordict


@pytest.fixture
def batch(make_batch: MakeBatch) -> ChunkBatch:
    """Four chunks that end in all ways, and an end marker."""
    ends = [ChunkEnd.ONGOING, ChunkEnd.TERMINATED, ChunkEnd.TRUNCATED, ChunkEnd.ONGOING, ChunkEnd.ABORTED]
    return make_batch([3, 2, 4, 1, 0], ends)


def test_each_row_is_a_step_in_the_layout_of_torchrls_collectors(batch: ChunkBatch) -> None:
    data, steps = to_tensordict(batch), batch.transitions()
    assert data.batch_size == (10,)
    np.testing.assert_array_equal(data["observation"].numpy(), steps.obs)
    np.testing.assert_array_equal(data["next", "observation"].numpy(), steps.next_obs)
    np.testing.assert_array_equal(data["action"].numpy(), steps.actions)
    np.testing.assert_array_equal(data["logp"].numpy(), steps.columns["logp"])
    assert data["next", "reward"].dtype == torch.float32
    np.testing.assert_allclose(data["next", "reward"][:, 0].numpy(), steps.rewards, rtol=1e-6)
    assert data["next", "terminated"][:, 0].nonzero()[:, 0].tolist() == [4]
    assert data["next", "truncated"][:, 0].nonzero()[:, 0].tolist() == [8]
    assert data["next", "done"][:, 0].nonzero()[:, 0].tolist() == [4, 8]
    assert to_tensordict(batch, set_truncated=True)["next", "truncated"][:, 0].nonzero()[:, 0].tolist() == [2, 8, 9]
    ids = data["collector", "traj_ids"]
    assert [len(set(part.tolist())) for part in ids.split([3, 2, 4, 1])] == [1] * 4
    assert len(set(ids.tolist())) == 4


def test_end_markers_alone_give_no_rows(make_batch: MakeBatch) -> None:
    assert to_tensordict(make_batch([0], [ChunkEnd.ABORTED])).batch_size == (0,)


def test_nested_spaces_become_nested_tensordicts() -> None:
    pytest.importorskip("gymnasium")
    import gymnasium as gym

    class Nested(gym.Env[Any, Any]):
        observation_space = gym.spaces.Dict(
            {"at": gym.spaces.Box(-1, 1, (2,)), "pair": gym.spaces.Tuple((gym.spaces.Discrete(3),) * 2)}
        )
        action_space = gym.spaces.Tuple((gym.spaces.Discrete(2), gym.spaces.Box(-1, 1, (1,))))

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
            return self.observation_space.sample(), {}

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            return self.observation_space.sample(), 0.0, False, False, {}

    with SingleAgentEnvRunner(EnvRunnerConfig(env=Nested, num_envs=2, rollout_fragment_length=4, seed=0)) as runner:
        batch = runner.sample_fragment(random_actions=True)
    data, steps = to_tensordict(batch), batch.transitions()
    np.testing.assert_array_equal(data["observation", "pair", "1"].numpy(), steps.obs["pair"][1])
    np.testing.assert_array_equal(data["next", "observation", "at"].numpy(), steps.next_obs["at"])
    np.testing.assert_array_equal(data["action", "1"].numpy(), steps.actions[1])


def test_a_replay_buffer_gives_back_what_it_was_given(batch: ChunkBatch) -> None:
    buffer = torchrl_data.TensorDictReplayBuffer(storage=torchrl_data.LazyTensorStorage(15), batch_size=64)
    for _ in range(3):
        buffer.extend(to_tensordict(batch))
    assert len(buffer) == 15
    known = {tuple(row) for row in batch.transitions().next_obs.tolist()}
    sample = buffer.sample()
    assert {tuple(row) for row in sample["next", "observation"].tolist()} <= known
    terminal = sample["observation"][sample["next", "terminated"][:, 0]]
    assert (terminal == torch.from_numpy(batch.transitions().obs[4])).all()


def test_slices_of_a_replay_buffer_stay_within_a_chunk(batch: ChunkBatch) -> None:
    sampler = torchrl_data.SliceSampler(slice_len=3, traj_key=("collector", "traj_ids"), strict_length=True)
    buffer = torchrl_data.TensorDictReplayBuffer(
        storage=torchrl_data.LazyTensorStorage(10), sampler=sampler, batch_size=60
    )
    buffer.extend(to_tensordict(batch))
    ids = buffer.sample()["collector", "traj_ids"].view(-1, 3)
    assert (ids == ids[:, :1]).all()


def test_chunks_of_one_episode_have_their_own_ids() -> None:
    """Another rank may have the chunk between two of them: a slice of a replay buffer must not go across."""
    config = EnvRunnerConfig(env="Pendulum-v1", num_envs=1, rollout_fragment_length=5, seed=0)
    with SingleAgentEnvRunner(config) as runner:
        batches = [runner.sample_fragment(random_actions=True) for _ in range(3)]
    assert len({batch[0].episode_id for batch in batches}) == 1
    ids = [set(to_tensordict(batch)["collector", "traj_ids"].tolist()) for batch in batches]
    assert [len(own) for own in ids] == [1] * 3
    assert len(set.union(*ids)) == 3


def test_torchrls_own_estimator_gives_the_advantages_of_gae(batch: ChunkBatch) -> None:
    functional: Any = pytest.importorskip("torchrl.objectives.value.functional")
    data = to_tensordict(batch, set_truncated=True)
    episodes = batch.episodes()
    values = torch.linspace(-1.0, 1.0, len(episodes.obs))
    rows = torch.from_numpy(episodes.step_rows)
    theirs, _ = functional.generalized_advantage_estimate(
        31 / 32,
        29 / 32,
        values[rows][:, None],
        values[rows + 1][:, None],
        *(data["next", name] for name in ("reward", "done", "terminated")),
    )
    ours = gae(episodes, values, gamma=31 / 32, gae_lambda=29 / 32)
    np.testing.assert_allclose(ours.advantages.numpy(), theirs[:, 0].numpy(), atol=1e-5)
