"""A sampler of Breakout in processes beside Stable-Baselines3's SubprocVecEnv with the same policy, in turns.

SubprocVecEnv has one process per env, ours share two. Its loop keeps no counters, and makes the same columns with the
same function of the same module. A reset of an Atari game with a seed loads the game again, which takes as long as a
hundred steps. So both seed only the first episode of each env; the row without a target seeds each.
"""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from bench import limits
from bench.env_processes import descendants, in_turns
from bench.sampler import Headrace
from bench.table import Row, rows_of
from support.envs.real import atari

WIDTH, PROCESSES, LENGTH = 8, 2, 32
NEEDS = ("ale_py", "cv2", "stable_baselines3")
MARKS = {"headrace": 1.1}
"""The target: the least ratio to SubprocVecEnv."""


def measure(seconds: float, rounds: int) -> list[Row]:
    """Return the rows of all loops; none where a package is missing."""
    if not all(find_spec(name) for name in NEEDS):
        return []
    from stable_baselines3.common.vec_env import SubprocVecEnv

    torch.set_num_threads(1)
    before = descendants()
    vector = SubprocVecEnv([partial(atari, None)] * WIDTH)  # type: ignore[arg-type, list-item]
    theirs = descendants() - before
    ours = _headrace(seed_every_episode=False)
    own = descendants() - before - theirs
    seeded = _headrace(seed_every_episode=True)
    loops: dict[str, tuple[Any, set[int]]] = {
        "SubprocVec": (_recording(vector, ours.module), theirs),
        "headrace": (ours, own),
        "seeded": (seeded, descendants() - before - theirs - own),
    }
    turns = in_turns(loops, seconds, rounds)
    for arm in (ours, seeded):
        arm.stop()
    vector.close()
    return rows_of("atari", f"{WIDTH} Breakouts in processes", "env steps/s", turns, "SubprocVec", MARKS)


def _headrace(*, seed_every_episode: bool) -> Headrace:
    return Headrace(
        WIDTH,
        env="support.envs.real:atari",
        env_placement="process",
        envs_per_process=WIDTH // PROCESSES,
        rollout_fragment_length=LENGTH,
        seed_every_episode=seed_every_episode,
    )


def _recording(vector: Any, module: Any) -> limits.Loop:
    """Return a loop of Stable-Baselines3's vector with the policy, recording into arrays."""
    act, random = module.numpy_act(), np.random.default_rng(0)
    obs = vector.reset()
    record: dict[str, Any] = {"obs": np.empty((LENGTH, *obs.shape), obs.dtype)}
    at = 0

    def step() -> None:
        nonlocal obs, at
        columns = act({"obs": obs}, random.random((WIDTH, module.noise_size), np.float32))
        before = obs
        obs, rewards, ends, _ = vector.step(columns["actions"])
        for name, rows in {**columns, "obs": before, "rewards": rewards, "ends": ends}.items():
            if name not in record:
                record[name] = np.empty((LENGTH, *rows.shape), rows.dtype)
            record[name][at] = rows
        at = (at + 1) % LENGTH

    return limits.Loop(WIDTH, step)
