"""Modules that choose several steps in one pass: which step of which pass each action is, and by which weights."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode

from headrace.schemas.chunks.chunk import EpisodeChunk
from headrace.schemas.chunks.spaces import Spaces
from headrace.schemas.errors import ModuleError
from headrace.workers import EnvRunnerConfig, SingleAgentEnvRunner
from headrace.workers.connectors import ClipActions
from headrace.workers.envs.spaces import convert
from headrace.workers.trained.trained_policy import TrainedPolicy
from support.envs.native_vectors import vector_of
from support.envs.toy import Counting, Faulty, check_books, diverge, runner
from support.envs.toy_agents import Together, multi_runner
from support.runners.ready import READY
from support.runners.stand_in_device import stand_in

SIZE = 4


class Sums(torch.nn.Module):
    """Chooses for each step of a chunk (the time that it saw + the number of the step) modulo 3."""

    noise_size, noise_kind, action_chunk_size = 0, "uniform", SIZE

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward_exploration(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"actions": (batch["obs"][:, :1].long() + torch.arange(SIZE)) % 3}

    forward_inference = forward_exploration


class Plans(torch.nn.Module):
    """Answers for each step of a chunk the step of the episode that it saw, its own number in the chunk, and noise."""

    noise_size, noise_kind, action_chunk_size = 2, "uniform", SIZE

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.passes = 0

    def forward_exploration(self, batch: dict[str, Any]) -> dict[str, Any]:
        self.passes += 1
        obs = batch["obs"]
        steps = torch.arange(self.action_chunk_size).expand(len(obs), -1)
        noise = batch["noise"][:, :1] if "noise" in batch else torch.zeros(len(obs), 1)
        return {
            "actions": steps % 3,
            "saw": obs[:, :1].expand(-1, self.action_chunk_size),
            "step": steps,
            "drawn": noise.expand(-1, self.action_chunk_size),
            "acts_by": self.weight.expand(len(obs), self.action_chunk_size),
        }

    forward_inference = forward_train = forward_exploration


def check(chunks: Iterable[EpisodeChunk]) -> int:
    """Check each step of `chunks` against the pass that it says to come from. Return how many actions there were."""
    checked = 0
    for chunk in chunks:
        columns = chunk.columns
        step = columns["action_chunk_step"]
        np.testing.assert_array_equal(columns["step"], step)
        np.testing.assert_array_equal(chunk.actions, step % 3)
        seen_at = np.arange(len(chunk)) - step
        here = seen_at >= 0  # else the pass belongs to the chunk before
        np.testing.assert_array_equal(columns["saw"][here], chunk.obs[seen_at[here], 0])
        np.testing.assert_array_equal(columns["acts_by"], chunk.weights_seq)
        if len(chunk) and not chunk.t_start:
            assert step[0] == 0
        checked += len(chunk)
    return checked


@pytest.mark.parametrize("polls", [1, 3, 8])
def test_actions_are_the_steps_of_one_pass_over_cuts_and_ends(polls: int) -> None:
    with runner(num_envs=3, env_config={"lengths": {0: 1, 1: 6, 2: 50}}, module=Plans) as sampler:
        assert sum(check(sampler.sample(num_timesteps=3 * polls)) for _ in range(6)) == 18 * polls
        check_books(sampler)


def test_envs_that_go_on_share_one_pass_every_few_steps() -> None:
    with runner(num_envs=8, env_config={"length": 100}, module=Plans) as sampler:
        check(sampler.sample(num_timesteps=8 * 16))
        module: Any = sampler.module
        assert module.passes == 16 / SIZE
    with runner(num_envs=8, env_config={"length": 6}, module=Plans) as sampler:
        check(sampler.sample(num_timesteps=8 * 12))
        module = sampler.module
        assert module.passes == 4, "at steps 0, 4 and 8, and where episodes begin, at 6"


def test_envs_that_wait_for_a_reset_share_the_later_passes() -> None:
    env = vector_of(Counting, "sync", AutoresetMode.NEXT_STEP)
    with runner(env, num_envs=4, env_config={"lengths": {0: 5, 1: 50, 2: 50, 3: 50}}, module=Plans) as sampler:
        for _ in range(6):
            check(sampler.sample(num_timesteps=4 * 4))
        module: Any = sampler.module
        assert module.passes <= 8 + 1, "of 24 polls each fourth, and each sixth, where an episode of env 0 begins"


def test_steps_bear_the_weights_that_chose_them() -> None:
    with runner(num_envs=2, env_config={"length": 50}, module=Plans) as sampler:
        seen = []
        for seq in range(1, 8):
            sampler.set_weights({"weight": np.full(1, seq, np.float32)}, seq)
            chunks = sampler.sample(num_timesteps=6)
            check(chunks)
            seen.append(chunks[0].weights_seq.tolist())
        assert seen[:4] == [[1, 1, 1], [1, 2, 2], [2, 2, 3], [3, 3, 3]]


def test_each_row_bears_the_weights_of_its_own_pass() -> None:
    with runner(num_envs=2, env_config={"lengths": {0: 50, 1: 3}}, module=Plans) as sampler:
        for seq in range(1, 20):
            sampler.set_weights({"weight": np.full(1, seq, np.float32)}, seq)
            check(sampler.sample(num_timesteps=2))


def test_another_learners_weights_begin_new_chunks() -> None:
    with runner(num_envs=2, env_config={"length": 50}, module=Plans) as sampler:
        sampler.set_weights({"weight": np.full(1, 9, np.float32)}, 9, learner_epoch=1)
        check(sampler.sample(num_timesteps=6))
        sampler.set_weights({"weight": np.full(1, 2, np.float32)}, 2, learner_epoch=2)
        (first, _) = sampler.sample(num_timesteps=6)
        check([first])
        assert first.weights_seq.tolist() == [2, 2, 2]
        assert first.columns["action_chunk_step"].tolist() == [0, 1, 2]


def test_a_failed_env_begins_with_a_new_pass() -> None:
    config = {"fault": diverge, "faulty": {1}, "every": 5, "steps": {}}
    with runner(Faulty, num_envs=3, env_config=config, module=Plans, rollout_fragment_length=4) as sampler:
        for _ in range(8):
            for chunk in sampler.sample_fragment():
                step = chunk.columns["action_chunk_step"]
                np.testing.assert_array_equal(chunk.columns["step"], step)
                assert len(step) == 0 or chunk.t_start or step[0] == 0
        check_books(sampler)


@pytest.mark.processes
@pytest.mark.parametrize("ready", READY)
def test_chunks_are_the_rows_own_at_any_order_of_ready_envs(ready: str) -> None:
    config = EnvRunnerConfig(
        env="support.envs.troubled:Jittery",
        module=Plans,
        num_envs=4,
        envs_per_process=2,
        env_placement="process",
        rollout_fragment_length=7,
        seed=3,
        **READY[ready],
    )
    with SingleAgentEnvRunner(config, run_uid="test") as sampler:
        assert sum(check(sampler.sample_fragment()) for _ in range(9)) == sampler.totals.delivered
        assert not sampler.totals.discarded


def test_chunks_made_on_a_device_are_those_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        stand_in(monkeypatch) as mode,
        runner(num_envs=3, env_config={"lengths": {0: 3, 1: 7, 2: 50}}, module=Plans, device="cuda") as sampler,
    ):
        assert check(sampler.sample(num_timesteps=3 * 24)) == 72
        module: Any = sampler.module
        assert 24 / SIZE < module.passes < 24
        assert mode.counts.back == module.passes


def test_each_agents_seat_has_its_own_chunk() -> None:
    with multi_runner(num_envs=2, env_config={"lengths": [2, 9, 5]}, module=Plans) as sampler:
        assert check(chunk for _ in range(6) for chunk in sampler.sample(num_timesteps=12))


class Joined(Together):
    """In env 1 the second agent comes at step 6; in env 0 it never comes."""

    def _here(self, parts: Any) -> Any:
        return {agent: part for agent, part in parts.items() if agent != "a1" or (self.index == 1 and self.t >= 6)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        observations, infos = super().reset(seed=seed)
        return self._here(observations), infos

    def step(self, actions: Any) -> Any:
        observations, rewards, *ends = super().step({"a0": 0, "a1": 0})
        return self._here(observations), self._here(rewards), *ends


def test_an_agent_that_comes_late_leaves_the_chunks_of_the_others() -> None:
    with multi_runner(Joined, num_envs=2, env_config={"lengths": [20, 20]}, module=Plans) as sampler:
        chunks = sampler.sample(num_timesteps=30)
        check(chunks)
    (own,) = [chunk for chunk in chunks if chunk.env_index == 0]
    assert own.columns["action_chunk_step"].tolist() == [t % SIZE for t in range(len(own))]


def test_the_neighbours_of_an_env_change_nothing() -> None:
    def of_env_0(num_envs: int, lengths: dict[int, int]) -> Any:
        with runner(num_envs=num_envs, env_config={"lengths": lengths}, module=Plans) as sampler:
            chunks = sampler.sample(num_timesteps=num_envs * 20)
        own = [chunk for chunk in chunks if chunk.env_index == 0]
        return [np.concatenate([chunk.columns[name] for chunk in own]).tolist() for name in ("drawn", "step")]

    assert of_env_0(1, {0: 7}) == of_env_0(4, {0: 7, 1: 1, 2: 3, 3: 50})


@pytest.mark.parametrize("explore", [True, False])
@pytest.mark.parametrize(("make", "lengths"), [(runner, {0: 7, 1: 5}), (multi_runner, [7, 5])])
def test_the_same_random_streams_give_the_same_steps(make: Any, lengths: Any, explore: bool) -> None:
    def play(sampler: Any) -> Any:
        chunks = sampler.sample(num_episodes=2)
        return [(chunk.columns["step"].tolist(), chunk.columns["drawn"].tolist()) for chunk in chunks]

    def player() -> Any:
        return make(num_envs=2, env_config={"lengths": lengths}, module=Plans, explore=explore)

    with player() as sampler, player() as restored:
        streams = sampler.get_state(components=["random_streams"])
        first = play(sampler)
        restored.set_state(sampler.get_state())
        assert play(sampler) == play(restored)
        sampler.set_state(streams)
        assert play(sampler) == first


def test_module_to_env_gets_one_step() -> None:
    with runner(num_envs=2, env_config={"length": 9}, module=Plans, module_to_env=[ClipActions]) as sampler:
        check(sampler.sample(num_timesteps=24))


def test_random_actions_come_from_no_chunk() -> None:
    with runner(num_envs=2, env_config={"length": 50}, module=Plans) as sampler:
        check(sampler.sample(num_timesteps=6))
        assert "action_chunk_step" not in sampler.sample(num_timesteps=6, random_actions=True)[0].columns
        assert [chunk.columns["action_chunk_step"][0] for chunk in sampler.sample(num_timesteps=6)] == [0, 0]


def test_actions_with_noise_end_with_exploration() -> None:
    with runner(num_envs=2, env_config={"length": 50}, module=Plans) as sampler:
        check(sampler.sample(num_timesteps=6))
        for chunk in sampler.sample(num_timesteps=6, explore=False):
            assert chunk.columns["drawn"].tolist() == [0, 0, 0]


class OneStep(Plans):
    def forward_exploration(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {**super().forward_exploration(batch), "values": torch.zeros(len(batch["obs"]))}


class Remembers(Plans):
    def initial_state(self) -> dict[str, torch.Tensor]:
        return {"h": torch.zeros(1)}


class Masked(Plans):
    obeys_action_mask = True


class NoNumber(Plans):
    action_chunk_size: Any = 2.5


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (OneStep, r"'values' has shape \(2,\), not 2 rows of 4 steps"),
        (Remembers, "Remembers has a memory, which it needs at each step, and an action_chunk_size of 4"),
        (Masked, "Masked has action masks, which it needs at each step"),
        (NoNumber, "action_chunk_size = 2.5 of the policy NoNumber is no number of steps"),
    ],
)
def test_a_module_that_cannot_be_so_is_refused(module: Any, said: str) -> None:
    with pytest.raises(ModuleError, match=said), runner(num_envs=2, module=module) as sampler:
        sampler.sample(num_timesteps=2)


def test_a_trained_policy_plays_whole_chunks_and_has_no_export(tmp_path: Path) -> None:
    config = EnvRunnerConfig(env=Counting, module=Sums)
    with SingleAgentEnvRunner(config, run_uid="test") as sampler:
        observation, action = sampler.get_spaces()["default_policy"]
        spaces = {"default_policy": Spaces(observation=convert(observation, "seen"), action=convert(action, "done"))}
        policy = TrainedPolicy(config, spaces, sampler.get_state()["rl_module"])
    seen = [np.array([t, 0], np.float32) for t in range(7)]
    assert [policy.act(obs) for obs in seen] == [0, 1, 2, 0, 1, 2, 0]
    policy.reset()
    assert [policy.act(obs) for obs in seen[5:]] == [2, 0]
    with pytest.raises(ModuleError, match="Sums chooses several steps at once, and an exported function one"):
        policy.export(tmp_path / "policy.pt")
