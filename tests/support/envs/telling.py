"""Envs that tell what their creators were told."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from headrace.workers import EnvContext


class Telling(gym.Env[Any, Any]):
    """Observes its own context, and a walk of its seed; nothing of it is bounded."""

    observation_space: Any = gym.spaces.Box(-np.inf, np.inf, (6,), np.float64)
    action_space: Any = gym.spaces.Discrete(2)

    def __init__(self, context: EnvContext) -> None:
        self._told = (context.worker_index, context.num_workers, context.vector_index, context.num_envs)
        self._seed = (context.seed or 0) % 1000
        self._at = 0.0

    def _observe(self) -> Any:
        return np.array([*self._told, self._seed, self._at], np.float64)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._at = self.np_random.normal()
        return self._observe(), {"seed": seed}

    def step(self, action: Any) -> Any:
        self._at += self.np_random.normal() + float(action)
        info = {"at": self._at} if action else {}
        return self._observe(), self._at, bool(self.np_random.random() < 0.1), False, info
