"""The sampler's own cost of a step: with large observations, and beside an env of MuJoCo and its policy.

PYTHONPATH=tests python -m bench.run --only observations
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from importlib.util import find_spec
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from bench import limits
from bench.sampler import Headrace
from bench.table import Row
from bench.turns import Turn, loops_in_turns
from headrace.workers.fleet.memory import keep_large_arrays

WIDTH, LENGTH = 4, 32
SIZES_KIB = (256, 1024)
MOST_COPIES = 3.0
"""The target: the largest cost of a step, in times that it takes to copy its observation."""
MOST_SHARE = 0.05
"""The target: the largest cost of a step, as a share of what the env and its policy take."""


def measure(seconds: float, rounds: int) -> list[Row]:
    """Return a row for each size of observations, and two for HalfCheetah where MuJoCo is installed."""
    torch.set_num_threads(1)
    keep_large_arrays()
    rows = [_copies(size, seconds, rounds) for size in SIZES_KIB]
    return rows + (_shares(seconds, rounds) if find_spec("mujoco") else [])


class Large(gym.Env[Any, Any]):
    """Shows one of four pictures of `kib` KiB; episodes last 100 steps."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self, kib: int) -> None:
        self.observation_space = gym.spaces.Box(0, 255, (kib, 1024), np.uint8)
        self._seen = [np.full((kib, 1024), number, np.uint8) for number in range(4)]
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Begin with the first picture."""
        self._steps = 0
        return self._seen[0], {}

    def step(self, action: Any) -> Any:
        """Show the next picture."""
        self._steps += 1
        return self._seen[self._steps % 4], 1.0, self._steps == 100, False, {}


def _copies(kib: int, seconds: float, rounds: int) -> Row:
    """Compare with copies of as many observations, from one place to another."""
    seen, kept = np.ones((2 * WIDTH, kib << 10), np.uint8), np.ones((2 * WIDTH, kib << 10), np.uint8)
    turn = iter(range(1 << 62))

    def copy() -> None:
        at = next(turn)
        kept[at % len(kept)] = seen[at * 3 % len(seen)]

    loops: dict[str, Any] = {
        "memcpy": limits.Loop(1, copy),
        "headrace": Headrace(WIDTH, env=lambda _: Large(kib), rollout_fragment_length=LENGTH, random_actions=True),
    }
    loops["headrace"].run(4 * seconds)  # until the heap has all that it will have
    turns = loops_in_turns(loops, seconds, rounds)
    return _row(f"{WIDTH} envs of {kib} KiB, in copies", turns, "memcpy", 0.0, MOST_COPIES)


def _shares(seconds: float, rounds: int) -> list[Row]:
    """Compare with the env and the module's own pass, one after the other.

    Such a loop needs all columns of a step in that step. The runner makes the log-densities once a fragment, so a
    second loop, which has no target, makes none at all.
    """
    ours = Headrace(1, env="HalfCheetah-v5")
    module: Any = ours.module
    loops: dict[str, Any] = {
        "env and policy": _env_and_policy(module, module.numpy_act()),
        "env and actions": _env_and_policy(module, module.numpy_act().choose),
        "headrace": ours,
    }
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # MuJoCo logs to the working folder
        turns = loops_in_turns(loops, seconds / 8, 8 * rounds)  # an env of MuJoCo varies more than what is to be seen
    return [
        _row("1 HalfCheetah, beside env and policy", turns, "env and policy", 1.0, MOST_SHARE),
        _row("1 HalfCheetah, beside env and actions", turns, "env and actions", 1.0, None),
    ]


def _env_and_policy(module: Any, act: Any) -> limits.Loop:
    """Return a loop of one HalfCheetah, as the runner makes it, and `act`."""
    random = np.random.default_rng(0)
    env = gym.make("HalfCheetah-v5", disable_env_checker=True)
    seen, _ = env.reset(seed=0)

    def step() -> None:
        nonlocal seen
        noise = random.standard_normal((1, module.noise_size), np.float32)  # other actions make other contacts
        seen, _, terminated, truncated, _ = env.step(act({"obs": seen[None]}, noise)["actions_for_env"][0])
        if terminated or truncated:
            seen, _ = env.reset()

    return limits.Loop(1, step)


def _row(case: str, turns: list[dict[str, Turn]], limit: str, less: float, most: float | None) -> Row:
    """Return the row of how long a step takes, in steps of `limit`, less so many of them."""
    costs = [turn[limit].rate / turn["headrace"].rate - less for turn in turns]
    cpu = statistics.median(turn[limit].per_cpu_s / turn["headrace"].per_cpu_s - less for turn in turns)
    rate = statistics.median(turn["headrace"].rate for turn in turns)
    cost, low, high = statistics.median(costs), min(costs), max(costs)
    return Row("observations", case, "headrace", "env steps/s", rate, cost, low, high, cpu, most=most)
