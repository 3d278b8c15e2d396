"""A sampler whose envs live in processes beside gymnasium's AsyncVectorEnv with a policy, in turns.

AsyncVectorEnv has one process per env, ours share two; its loop keeps no counters. Only ratios of a run mean anything.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
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
    before = descendants()
    vector: Any = gym.vector.AsyncVectorEnv([lambda: gym.make(limits.ENV)] * WIDTH, context="forkserver")
    theirs = descendants() - before
    ours = Headrace(WIDTH, env_placement="process", envs_per_process=WIDTH // PROCESSES)
    loops = {
        "AsyncVector": (limits.recording(vector, WIDTH), theirs),
        "headrace": (ours, descendants() - before - theirs),
    }
    turns = in_turns(loops, seconds, rounds)
    ours.stop()
    vector.close()
    case = f"{WIDTH} CartPoles in {PROCESSES} processes"
    return rows_of("processes", case, "env steps/s", turns, "AsyncVector", MARKS)


def in_turns(loops: Mapping[str, tuple[Any, set[int]]], seconds: float, rounds: int) -> list[dict[str, Turn]]:
    """Run turns of loops whose envs live in processes of these pids, round by round."""
    for loop, _ in loops.values():
        loop.run(seconds / 2)
    return [{name: _turn(*loop, seconds) for name, loop in loops.items()} for _ in range(rounds)]


def _turn(loop: Any, pids: set[int], seconds: float) -> Turn:
    everybody = [os.getpid(), *pids]
    start, before = time.perf_counter(), cpu_s(everybody)
    rate = loop.run(seconds)
    return Turn(rate, rate * (time.perf_counter() - start) / (cpu_s(everybody) - before))


def descendants() -> set[int]:
    """Return the processes below this one. Those that a fork server has forked are its children, not ours."""
    found, new = set[int](), {os.getpid()}
    while new:
        new = {child for pid in new for child in _children(pid)} - found
        found |= new
    return found


def _children(pid: int) -> Iterable[int]:
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        yield from map(int, task.read_text().split())
