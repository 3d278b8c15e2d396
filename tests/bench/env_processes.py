"""A sampler whose envs live in processes beside gymnasium's AsyncVectorEnv with a policy, in turns.

AsyncVectorEnv has one process per env, ours share two; its loop keeps no counters. Only ratios of a run mean anything.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch

from bench import limits
from bench.sampler import Headrace
from bench.table import Row, rows_of
from bench.turns import Turn, cpu_s

WIDTH, PROCESSES = 8, 2
MARKS = {"headrace": 3.0}
"""The target: the least ratio to AsyncVectorEnv."""


def measure(seconds: float, rounds: int) -> list[Row]:
    """Return the rows of both."""
    torch.set_num_threads(1)
    before = _children()
    vector: Any = gym.vector.AsyncVectorEnv([lambda: gym.make(limits.ENV)] * WIDTH, context="forkserver")
    theirs = _children() - before
    ours = Headrace(WIDTH, env_placement="process", envs_per_process=WIDTH // PROCESSES)
    loops = {
        "AsyncVector": (limits.recording(vector, WIDTH), theirs),
        "headrace": (ours, _children() - before - theirs),
    }
    for loop, _ in loops.values():
        loop.run(seconds / 2)
    turns = [{name: _turn(*loop, seconds) for name, loop in loops.items()} for _ in range(rounds)]
    ours.stop()
    vector.close()
    case = f"{WIDTH} CartPoles in {PROCESSES} processes"
    return rows_of("processes", case, "env steps/s", turns, "AsyncVector", MARKS)


def _turn(loop: Any, pids: set[int], seconds: float) -> Turn:
    everybody = [os.getpid(), *pids]
    start, before = time.perf_counter(), cpu_s(everybody)
    rate = loop.run(seconds)
    return Turn(rate, rate * (time.perf_counter() - start) / (cpu_s(everybody) - before))


def _children() -> set[int]:
    listed = (task.read_text().split() for task in Path("/proc/self/task").glob("*/children"))
    return {int(pid) for pids in listed for pid in pids}
