"""A small driver of env processes, and what the same lanes live through in this process: for comparison."""

from __future__ import annotations

import os
import zlib
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from headrace.workers import EnvContext, EnvRunnerConfig
from headrace.workers.envs.creators import build_env, find_creator
from headrace.workers.envs.failures import Failure
from headrace.workers.envs.process.pool import EnvProcessPool

POLL_S = 100.0
"""Longest wait for any answer."""


def seed_of(lane: int, episode: int) -> int:
    return 1000 * lane + episode


def action_of(lane: int, step: int, actions: int) -> int:
    return zlib.crc32(f"{lane} {step}".encode()) % actions


class Driver:
    """Steps every lane whenever it can be stepped. `lives[lane]` is all it saw: (observation, reward, end)."""

    def __init__(self, pool: EnvProcessPool, *, armed: bool = False) -> None:
        self.pool = pool
        self.lives: dict[int, list[Any]] = defaultdict(list)
        self.failures: list[Failure] = []
        self.episodes: dict[int, int] = defaultdict(int)
        self._armed = armed
        self._actions = {name: np.zeros_like(column) for name, column in pool.actions.items()}
        for lane in range(pool.width):
            self._reset(lane)

    def _reset(self, lane: int) -> None:
        self.pool.reset(lane, seed_of(lane, self.episodes[lane]))

    def run(self, enough: Callable[[], bool]) -> None:
        """Go on until it is enough."""
        while not enough():
            answers = self.pool.step_wait(POLL_S)
            assert answers, "no env answers"
            for lane in answers.stepped:
                ended = dict(answers.ended).get(lane)
                self._note(lane, float(self.pool.rewards[lane]), ended)
            self._begin(answers)
            began = {lane for lane, _ in answers.began}
            ended_lanes = {lane for lane, _ in answers.ended}
            self.failures += answers.failures
            failed = {failure.lane for failure in answers.failures}
            for lane in failed:
                self.pool.rebuild(lane)
            for lane in [*answers.built, *(ended_lanes - began - failed)]:
                self._reset(lane)
            self._step(sorted((set(answers.stepped) - ended_lanes) | began))

    def _begin(self, answers: Any) -> None:
        self.pool.begin([lane for lane, _ in answers.began])
        for lane, info in answers.began:
            assert info.get("seed", seed_of(lane, self.episodes[lane])) == seed_of(lane, self.episodes[lane])
            self.episodes[lane] += 1
            self._note(lane, None, None)

    def _note(self, lane: int, reward: float | None, end: Any) -> None:
        seen = {name: column[lane].tobytes() for name, column in self.pool.observations.items()}
        self.lives[lane].append((seen, reward, end))

    def _step(self, lanes: list[int]) -> None:
        if not lanes:
            return
        for lane in lanes:
            self._actions["actions"][lane] = action_of(lane, len(self.lives[lane]), 2)
        seeds = {lane: seed_of(lane, self.episodes[lane]) for lane in lanes} if self._armed else None
        self.pool.step_async(lanes, self._actions, next_seeds=seeds)


def live_inline(config: EnvRunnerConfig, lane: int, length: int) -> list[Any]:
    """Return the lives of a lane whose env is in this process, in the form of `Driver.lives`."""
    context = EnvContext(config.env_config, vector_index=lane)
    env = build_env(find_creator(config.env), context)
    life: list[Any] = []
    episode, over = 0, True
    action = np.zeros((), env.action_space.dtype) if env.action_space.shape == () else np.zeros((1,), np.float32)
    while len(life) < length:
        if over:
            observation, _ = env.reset(seed=seed_of(lane, episode))
            life.append(({"obs": observation.tobytes()}, None, None))
            episode, over = episode + 1, False
            continue
        chosen = (action + action_of(lane, len(life), 2)).astype(action.dtype)
        observation, reward, terminated, truncated, _ = env.step(chosen)
        over = terminated or truncated
        life.append(({"obs": observation.tobytes()}, float(reward), 1 if terminated else 2 if truncated else None))
    env.close()
    return life


def descriptors() -> int:
    """How many this process has open."""
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def is_running(pid: int) -> bool:
    """Return whether the process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
