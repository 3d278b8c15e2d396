"""DQN: the replay buffer has the stream's transitions, targets equal a plain loop, and it learns, resumes, refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from headrace.learner_stub.reference.dqn import DQN
from headrace.learner_stub.reference.policy_builder import build_policies
from headrace.learner_stub.reference.replay import ReplayBuffer, n_step_columns
from headrace.learner_stub.rollouts.module import build_q_module
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.chunks.spaces import Box, Spaces
from headrace.schemas.errors import ConfigError, ModuleError
from headrace.schemas.settings.config import FleetConfig, LearnerSection, ModuleSection
from headrace.schemas.settings.config_loading import build_config
from headrace.workers import EnvRunnerConfig, SingleAgentEnvRunner

MakeBatch = Callable[..., ChunkBatch]

ONGOING, TERMINATED, TRUNCATED, ABORTED = ChunkEnd
Q_NETWORK = "headrace.workers.modules:q_network"
SETTINGS = LearnerSection(algorithm="dqn", learning_starts=32, buffer_size=256, minibatch_size=16)


class Timed(gym.Env[Any, Any]):
    """Tells its episode and step. Episodes of 5 steps terminate, of 7 are truncated, and some steps fail."""

    observation_space = gym.spaces.Box(-1.0, np.inf, (3,), np.float32)
    action_space = gym.spaces.Discrete(2)
    episode = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t, self.name = 0, float(self.np_random.integers(1 << 20))
        self.length = int(self.np_random.choice([5, 7]))
        return self.observe(), {}

    def observe(self) -> Any:
        return np.array([self.name, self.t, self.length], np.float32)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        if self.np_random.random() < 0.02:
            raise RuntimeError("fell over")
        over = self.t == self.length
        return self.observe(), float(self.t), over and self.length == 5, over and self.length == 7, {}


@pytest.fixture(scope="module")
def batches() -> list[ChunkBatch]:
    """Forty real batches: cut, terminated, truncated and aborted chunks."""
    with SingleAgentEnvRunner(
        EnvRunnerConfig(env=Timed, num_envs=3, rollout_fragment_length=8, seed=3, module=Q_NETWORK)
    ) as runner:
        return [runner.sample_fragment() for _ in range(40)]


def new_dqn(spaces: Spaces, settings: LearnerSection = SETTINGS) -> DQN:
    return DQN(build_q_module(ModuleSection(build=Q_NETWORK, config={"hidden": (16,)}), spaces), settings, spaces)


def test_the_buffer_has_each_step_once_with_the_true_next_observation(batches: list[ChunkBatch]) -> None:
    replay = ReplayBuffer(10_000)
    for batch in batches:
        replay.add(batch, gamma=0.9, n_step=1)
    assert len(replay) == sum(batch.steps for batch in batches)
    have = {name: column[: len(replay)] for name, column in replay._columns.items()}
    steps = {tuple(row) for row in have["obs"][:, :2]}
    assert len(steps) == len(replay), "each step once"
    np.testing.assert_array_equal(have["next_obs"][:, 0], have["obs"][:, 0])  # never another episode's
    np.testing.assert_array_equal(have["next_obs"][:, 1], have["obs"][:, 1] + 1)  # never that of a reset
    np.testing.assert_array_equal(have["returns"], have["next_obs"][:, 1])
    ended = have["discounts"] == 0
    np.testing.assert_array_equal(ended, (have["next_obs"][:, 1] == 5) & (have["obs"][:, 2] == 5))
    assert ended.any()
    assert (have["next_obs"][:, 1] == 7).any(), "truncated steps are there, and not as ends"
    assert (have["discounts"][~ended] == np.float32(0.9)).all()


@pytest.mark.parametrize("n_step", [1, 3, 100])
def test_n_step_columns_equal_a_plain_loop_over_the_chunks(batches: list[ChunkBatch], n_step: int) -> None:
    for batch in batches:
        columns = n_step_columns(batch, gamma=0.9, n_step=n_step)
        order = np.arange(len(batch)) if batch.order is None else batch.order
        in_columns = [chunk for _, chunk in sorted(zip(order.tolist(), batch, strict=True), key=lambda pair: pair[0])]
        row = 0
        for chunk in in_columns:
            for t in range(len(chunk)):
                stop = min(t + n_step, len(chunk))
                total = sum(0.9 ** (k - t) * chunk.rewards[k] for k in range(t, stop))
                over = stop == len(chunk) and chunk.end is TERMINATED
                assert columns["returns"][row] == pytest.approx(total, rel=1e-6)
                assert columns["discounts"][row] == pytest.approx(0.0 if over else 0.9 ** (stop - t), rel=1e-6)
                np.testing.assert_array_equal(columns["next_obs"][row], chunk.obs[stop])
                np.testing.assert_array_equal(columns["obs"][row], chunk.obs[t])
                assert columns["actions"][row] == chunk.actions[t]
                row += 1
        assert row == batch.steps == len(columns["returns"])


def test_a_full_buffer_keeps_the_newest_steps(make_batch: MakeBatch) -> None:
    replay = ReplayBuffer(16)
    parts = [make_batch([12], [ONGOING], seed=seed) for seed in range(3)] + [make_batch([20], [ONGOING], seed=9)]
    for count, part in enumerate(parts, 1):
        replay.add(part, gamma=0.9, n_step=1)
        newest = np.concatenate([batch.columns["rewards"] for batch in parts[:count]])[-16:].astype(np.float32)
        assert sorted(replay._columns["returns"][: len(replay)]) == sorted(newest)


def test_targets_take_the_modules_choice_and_the_target_networks_value(make_batch: MakeBatch, spaces: Spaces) -> None:
    dqn = new_dqn(spaces)
    with torch.no_grad():
        for parameter in dqn._target.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    dqn.replay.add(make_batch([30, 10], [TERMINATED, TRUNCATED]), gamma=0.9, n_step=2)
    sample = dqn.replay.sample(np.random.default_rng(0), 64, spaces)
    expected = []
    for row in range(64):
        after = sample["next_obs"][row : row + 1]
        own, target = dqn.module.q_values(after)[0].tolist(), dqn._target.q_values(after)[0].tolist()
        best = own.index(max(own))
        expected.append(sample["returns"][row].item() + sample["discounts"][row].item() * target[best])
    np.testing.assert_allclose(dqn._targets(sample), expected, rtol=1e-6, atol=1e-6)


def test_dqn_learns_to_guess(guessing: Any, make_batch: MakeBatch, spaces: Spaces) -> None:
    settings = LearnerSection(algorithm="dqn", learning_starts=32, learning_rate=0.01, target_update_interval=10)
    dqn, random = new_dqn(spaces, settings), np.random.default_rng(0)
    for _ in range(10):
        contexts, actions = random.integers(3, size=(2, 64))
        batch = make_batch([1] * 64, [TERMINATED] * 64)
        obs = np.eye(3, dtype=np.float32)[np.repeat(contexts, 2)]
        batch.columns.update(obs=obs, actions=actions, rewards=(actions == contexts).astype(np.float64))
        dqn.update([batch])
    assert dqn.module.q_values(torch.eye(3)).argmax(1).tolist() == [0, 1, 2]


def test_a_resumed_learner_has_its_weights_and_trains_once_the_buffer_is_filled_again(
    make_batch: MakeBatch, spaces: Spaces
) -> None:
    parts = [make_batch([24], [ONGOING], seed=seed) for seed in range(6)]
    first = new_dqn(spaces)
    told = [first.update([part]) for part in parts[:3]]
    assert ["loss" in metrics for metrics in told] == [False, False, True]
    state, arrays = first.get_state()
    resumed = new_dqn(spaces)
    resumed.set_state(state, {name: array.copy() for name, array in arrays.items()})
    for name, tensor in first.weights().items():
        assert torch.equal(tensor, resumed.weights()[name]), name
        assert torch.equal(tensor, resumed._target.state_dict()[name]), name
    told = [resumed.update([part]) for part in parts[3:]]
    assert ["loss" in metrics for metrics in told] == [False, False, True]
    assert told[-1]["steps"] == 6 * 24


def test_the_rate_of_exploration_falls_with_the_steps_and_goes_to_workers(
    make_batch: MakeBatch, spaces: Spaces
) -> None:
    dqn = new_dqn(spaces, LearnerSection(algorithm="dqn", exploration_steps=48, exploration_final=0.1))
    rates = [dqn.weights()["exploration_rate"].item()]
    for _ in range(3):
        dqn.update([make_batch([24], [ONGOING])])
        rates.append(dqn.weights()["exploration_rate"].item())
    assert rates == pytest.approx([1.0, 0.55, 0.1, 0.1])


def test_what_dqn_cannot_train_is_refused_with_what_to_take_instead(spaces: Spaces) -> None:
    box = Spaces(observation=spaces.observation, action=Box(shape=(2,), dtype="<f4"))
    config = FleetConfig(learner=LearnerSection(algorithm="dqn"))
    with pytest.raises(ModuleError, match=r"Discrete space.*Box.*\"ppo\" or \"impala\""):
        build_policies(config, {"default_policy": box})
    with pytest.raises(ModuleError, match=r"DQN chooses.*Box.*\"ppo\""):
        DQN(build_q_module(ModuleSection(build=Q_NETWORK), spaces), SETTINGS, box)
    with pytest.raises(ModuleError, match=r"has no q_values.*leave module\.build out"):
        build_q_module(ModuleSection(), spaces)
    recurrent = build_q_module(ModuleSection(build=Q_NETWORK), spaces)
    recurrent.initial_state = dict  # type: ignore[attr-defined]
    with pytest.raises(ModuleError, match=r"QNetwork is recurrent.*module without memory"):
        DQN(recurrent, SETTINGS, spaces)
    with pytest.raises(ModuleError, match=r"no memory for .* lower learner\.buffer_size"):
        ReplayBuffer(1 << 60)._empty("obs", np.zeros((1, 4)))
    with pytest.raises(ConfigError, match="learning_starts = 1000 steps never fit buffer_size = 10"):
        build_config({"learner": {"buffer_size": 10}})


def test_dqn_has_a_q_network_unless_another_module_is_named() -> None:
    assert build_config({"learner": {"algorithm": "dqn"}}).module.build == Q_NETWORK
    assert build_config({"learner": {"algorithm": "dqn"}, "module": {"build": "my:net"}}).module.build == "my:net"
    assert FleetConfig(learner=LearnerSection(algorithm="dqn")).module.build == Q_NETWORK
    assert "q_network" not in FleetConfig().module.build


def test_each_of_several_policies_has_a_buffer_of_its_own(make_batch: MakeBatch, spaces: Spaces) -> None:
    config = build_config({"learner": {"algorithm": "dqn"}, "sampling": {"policies": {"one": {}, "two": {}}}})
    policies = build_policies(config, {"one": spaces, "two": spaces})
    policies.update([replace(make_batch([12], [ONGOING]), modules=("one",))])
    sizes = {name: len(policy.replay) for name, policy in policies.by_id.items() if isinstance(policy, DQN)}
    assert sizes == {"one": 12, "two": 0}
