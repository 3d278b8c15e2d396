"""Forward passes over blocks of lanes: each pass is as wide as its block, and recurrent state is kept by lane."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import torch

from headrace.schemas.chunks.spaces import Spaces
from headrace.workers import EnvRunnerConfig, SingleAgentEnvRunner
from headrace.workers.envs.spaces import convert
from headrace.workers.policy.acting import Actor, BlockActor
from headrace.workers.policy.module_protocol import build_module
from support.runners.recurrent import LSTM

SPACES = Spaces(
    observation=convert(gym.spaces.Box(-9.0, 9.0, (3,), np.float32), "observation"),
    action=convert(gym.spaces.Discrete(4), "action"),
)
BLOCKS = [np.array([0, 2, 4]), np.array([1, 3])]
NOISE = np.random.default_rng(1).random((5, 1), dtype=np.float32)


def observations() -> dict[str, Any]:
    return {"obs": np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)}


def test_a_blocks_pass_equals_a_separate_pass_whichever_lanes_act() -> None:
    torch.manual_seed(0)
    seen = observations()
    module: Any = build_module("headrace.workers.modules:actor_critic", SPACES, {}).eval()
    actor = BlockActor(module, SPACES, seen, int, BLOCKS)
    for block, acting in ((0, [0, 2, 4]), (0, [2]), (1, [3]), (1, [1, 3])):
        lanes = BLOCKS[block]
        alone = Actor(module, SPACES, {"obs": seen["obs"][lanes]}, int)(NOISE[lanes])
        columns = actor(NOISE, np.array(acting))
        assert {name: rows[lanes].tobytes() for name, rows in columns.items()} == {
            name: rows.tobytes() for name, rows in alone.items()
        }


def test_a_pass_over_all_blocks_reads_the_current_observations() -> None:
    torch.manual_seed(0)
    seen = observations()
    module: Any = build_module("headrace.workers.modules:actor_critic", SPACES, {}).eval()
    actor = BlockActor(module, SPACES, seen, int, BLOCKS)
    first = actor(NOISE)["values"].copy()
    seen["obs"] += 1.0
    second = actor(NOISE)["values"]
    np.testing.assert_allclose(second, Actor(module, SPACES, seen, int)(NOISE)["values"], rtol=1e-5)
    assert (first != second).all()


def test_a_pass_updates_the_memory_of_acting_lanes_only() -> None:
    torch.manual_seed(0)
    module: Any = build_module(LSTM, SPACES, {}).eval()
    actor = BlockActor(module, SPACES, observations(), int, BLOCKS)
    assert actor.memory is not None
    before = {name: rows.copy() for name, rows in actor.memory.rows.items()}
    actor(NOISE, np.array([0, 4, 3]))
    for name, rows in actor.memory.rows.items():
        moved = (rows != before[name]).any(tuple(range(1, rows.ndim)))
        assert moved.tolist() == [True, False, False, True, True]
        assert (actor.memory.of(0, before=True)[name] == before[name][0]).all()


class Counting(torch.nn.Module):
    """Notes how wide its passes are."""

    noise_size, noise_kind = 1, "uniform"
    widths: ClassVar[set[int]] = set()

    def __init__(self, spaces: Any) -> None:
        super().__init__()

    def forward_inference(self, batch: dict[str, Any]) -> dict[str, Any]:
        self.widths.add(len(batch["obs"]))
        return {"actions": torch.zeros(len(batch["obs"]), dtype=torch.int64)}

    forward_exploration = forward_train = forward_inference


def test_with_double_buffering_a_pass_is_as_wide_as_half_of_the_envs() -> None:
    Counting.widths.clear()
    config = EnvRunnerConfig(
        env="CartPole-v1",
        num_envs=5,
        envs_per_process=5,
        env_placement="process",
        double_buffering=True,
        module=Counting,
        seed=0,
    )
    runner = SingleAgentEnvRunner(config)
    assert sum(len(chunk) for chunk in runner.sample(num_timesteps=200)) >= 200
    runner.stop()
    assert Counting.widths == {2, 3}
