"""Envs in processes of their own beside gymnasium's AsyncVectorEnv, in turns, with the same policy and the same record.

AsyncVectorEnv has a process for each env; ours share two. Only ratios of one run mean anything.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gymnasium as gym
import limits
import numpy as np
import torch
from table import Row, rows_of
from turns import Turn, cpu_s

from headrace.workers import EnvRunnerConfig
from headrace.workers.envs.process.pool import EnvProcessPool

WIDTH, PROCESSES = 8, 2
MARKS = {"headrace": 3.0}
"""Least ratio to AsyncVectorEnv that is aimed at."""


class Pool:
    """Steps an `EnvProcessPool` in lock-step, as a gymnasium vector is stepped."""

    def __init__(self, pool: EnvProcessPool) -> None:
        self._pool = pool
        self._seed = 0
        self._terminated, self._truncated = np.zeros((2, pool.width), bool)

    def reset(self) -> Any:
        """Begin an episode everywhere; the observations."""
        for lane in range(self._pool.width):
            self._pool.try_reset(lane, lane)
        self._gather("began")
        return self._pool.observations["obs"]

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """One step of all."""
        self._seed += self._pool.width
        seeds = {lane: self._seed + lane for lane in range(self._pool.width)}
        self._pool.send_actions(None, {"actions": actions}, next_seeds=seeds)
        self._terminated[:] = self._truncated[:] = False
        self._gather("stepped")
        return self._pool.observations["obs"], self._pool.rewards, self._terminated, self._truncated, {}

    def _gather(self, what: str) -> None:
        missing = self._pool.width
        while missing:
            answers = self._pool.poll()
            assert not answers.failures
            for lane, end in answers.ended:
                (self._terminated if end == 1 else self._truncated)[lane] = True
            if answers.began:
                self._pool.begin([lane for lane, _ in answers.began])
            missing -= len(getattr(answers, what))


def measure(seconds: float, rounds: int) -> list[Row]:
    """Rows of both."""
    torch.set_num_threads(1)
    with _vectors() as vectors:
        loops = {name: (_loop(vector, obs), pids) for name, (vector, obs, pids) in vectors.items()}
        for loop, _ in loops.values():
            loop.run(seconds / 2)
        turns = [{name: _turn(loop, pids, seconds) for name, (loop, pids) in loops.items()} for _ in range(rounds)]
    case = f"{WIDTH} CartPoles in {PROCESSES} processes"
    return rows_of("processes", case, "env steps/s", turns, "AsyncVector", MARKS)


@contextmanager
def _vectors() -> Iterator[dict[str, tuple[Any, Any, list[int]]]]:
    """Name -> (vector, first observations, pids)."""
    config = EnvRunnerConfig(env=limits.ENV, num_envs=WIDTH, envs_per_process=WIDTH // PROCESSES)
    theirs: Any = gym.vector.AsyncVectorEnv([lambda: gym.make(limits.ENV)] * WIDTH, context="spawn")
    try:
        with EnvProcessPool(config) as pool:
            ours = Pool(pool)
            pids = [process.pid for process in theirs.processes]
            yield {"AsyncVector": (theirs, theirs.reset(seed=0)[0], pids), "headrace": (ours, ours.reset(), pool.pids)}
    finally:
        theirs.close()


def _loop(vector: Any, obs: Any) -> limits.Loop:
    policy, record = limits.TorchPolicy(), limits.arrays(WIDTH)
    at = -1

    def step() -> None:
        nonlocal obs, at
        at = (at + 1) % limits.HORIZON
        obs = limits.record_step(vector, policy, obs, record, at)

    return limits.Loop(WIDTH, step)


def _turn(loop: limits.Loop, pids: list[int], seconds: float) -> Turn:
    own = [os.getpid(), *pids]
    start, before = time.perf_counter(), cpu_s(own)
    rate = loop.run(seconds)
    return Turn(rate, rate * (time.perf_counter() - start) / (cpu_s(own) - before))
