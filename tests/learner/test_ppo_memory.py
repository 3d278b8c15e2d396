"""PPO on a recurrent module: whole chunks from their stored state, and a task that needs memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from headrace.learner_stub.reference.ppo import PPO
from headrace.learner_stub.rollouts.minibatches import ChunkMinibatches, minibatches_for
from headrace.learner_stub.rollouts.module import build_module
from headrace.learner_stub.rollouts.rollout import join
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.errors import ModuleError
from headrace.schemas.settings.config import LearnerSection, ModuleSection
from headrace.workers import EnvRunnerConfig, SingleAgentEnvRunner
from headrace.workers.modules import sequences

pytestmark = pytest.mark.long

MakeBatch = Callable[..., ChunkBatch]

LSTM = ModuleSection(
    build="headrace.workers.modules:lstm_actor_critic", config={"hidden": (16,), "cell_size": 16, "seed": 1}
)
PLAIN = ModuleSection(config={"hidden": (32,), "seed": 1})
DELAY = 5


class Recall(gym.Env[Any, Any]):
    """The first observation tells a sign; the last of `DELAY` actions is rewarded for repeating it."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t, self.sign = 0, int(self.np_random.integers(2))
        return np.array([2 * self.sign - 1, 0.0], np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        over = self.t == DELAY
        return np.array([0.0, self.t / DELAY], np.float32), float(over and action == self.sign), over, False, {}


def _runner(module: ModuleSection, fragment: int = 16) -> SingleAgentEnvRunner:
    return SingleAgentEnvRunner(
        EnvRunnerConfig(
            env=lambda _: Recall(),
            num_envs=16,
            seed=0,
            rollout_fragment_length=fragment,
            module=module.build,
            module_config=module.config,
        ),
        worker_index=0,
    )


def _ppo(module: ModuleSection, runner: SingleAgentEnvRunner, **settings: Any) -> PPO:
    return PPO(build_module(module, runner.spaces), LearnerSection(**settings))


@pytest.mark.parametrize("fragment", [3, 16])
def test_before_the_first_step_every_ratio_is_one(fragment: int) -> None:
    with _runner(LSTM, fragment) as runner:
        ppo = _ppo(LSTM, runner)
        batches = [runner.sample_fragment() for _ in range(4)]
        assert any(chunk.t_start and chunk.state_in["h"].any() for batch in batches for chunk in batch)
    rollout = join(batches)
    assert rollout is not None
    targets = ppo._targets(rollout, minibatches_for(ppo.module, rollout))
    ratios = torch.exp(targets.logp - rollout.logp)
    np.testing.assert_allclose(ratios.numpy(), 1.0, atol=1e-5)


def test_minibatches_are_whole_chunks_and_hold_each_step_once() -> None:
    with _runner(LSTM, 7) as runner:
        batches = [runner.sample_fragment() for _ in range(3)]
        module = build_module(LSTM, runner.spaces)
    rollout = join(batches)
    assert rollout is not None
    feed = ChunkMinibatches(rollout)
    whole = module.forward_train(next(feed.all_rows(10**6))[0])["values"][torch.from_numpy(rollout.episodes.step_rows)]
    seen = []
    for minibatch in feed.shuffled(np.random.default_rng(0), 50):
        assert len(minibatch.steps) < 50 + 7
        values = module.forward_train(minibatch.batch)["values"][minibatch.answers]
        torch.testing.assert_close(values, whole[minibatch.steps])
        seen += minibatch.steps.tolist()
    assert sorted(seen) == list(range(len(rollout)))


def test_passes_over_all_rows_do_not_divide_chunks() -> None:
    with _runner(LSTM, 7) as runner:
        rollout = join([runner.sample_fragment() for _ in range(3)])
        module = build_module(LSTM, runner.spaces)
    assert rollout is not None
    feed = ChunkMinibatches(rollout)
    parts = [(module.forward_train(batch)["values"], rows) for batch, rows in feed.all_rows(40)]
    assert len(parts) > 5
    assert all(len(values) == rows for values, rows in parts)
    whole = module.forward_train(next(feed.all_rows(10**6))[0])["values"]
    torch.testing.assert_close(torch.cat([values for values, _ in parts]), whole)


def test_minibatches_give_a_recurrent_module_the_arrays_of_sequences() -> None:
    with _runner(LSTM, 7) as runner:
        batch = runner.sample_fragment()
    assert isinstance(batch, ChunkBatch)
    rollout = join([batch])
    assert rollout is not None
    given, expected = next(ChunkMinibatches(rollout).all_rows(10**6))[0], sequences(batch)
    assert given.keys() == expected.keys()
    for name in ("obs", "lengths", "step_rows"):
        assert torch.equal(given[name], expected[name]), name
    assert all(torch.equal(given["state_in"][name], state) for name, state in expected["state_in"].items())


def _learn(module: ModuleSection, updates: int) -> float:
    with _runner(module) as runner:
        ppo = _ppo(module, runner, learning_rate=0.003, gamma=1.0, gae_lambda=1.0, minibatch_size=128, epochs=6)
        for seq in range(1, updates + 1):
            metrics = ppo.update([runner.sample_fragment() for _ in range(4)])
            runner.set_weights({name: tensor.numpy() for name, tensor in ppo.module.state_dict().items()}, seq)
    return metrics["mean_return"]


@pytest.mark.thorough
def test_an_lstm_learns_a_recall_task_that_a_memoryless_module_cannot() -> None:
    assert _learn(LSTM, 12) > 0.95
    assert _learn(PLAIN, 12) < 0.7


def test_a_recurrent_module_refuses_batches_without_state_in(make_batch: MakeBatch) -> None:
    with _runner(LSTM) as runner:
        ppo = _ppo(LSTM, runner)
    with pytest.raises(ModuleError, match="LstmActorCritic is recurrent, and the batches carry no state_in"):
        ppo.update([make_batch([4], [ChunkEnd.ONGOING])])


def test_batches_whose_columns_differ_are_refused_by_slot(make_batch: MakeBatch) -> None:
    plain, other = (make_batch([4], [ChunkEnd.ONGOING]) for _ in range(2))
    other.arrays["state_in/h"] = np.zeros((1, 2), np.float32)
    with pytest.raises(ModuleError, match=r"slots 0 and 0 only one has the columns \['state_in/h'\]"):
        join([plain, other])
