"""Envs whose every text would control a terminal: errors, what they print, and where they fail."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

HOSTILE = "a\x1b[31mb\x9b2Jc\u202ed\u200fe\x07f\x7fg\rh\u2066"


class Hostile(gym.Env[Any, Any]):
    """Fails in one of 500 steps."""

    observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        if self.np_random.random() < 0.002:
            print(HOSTILE)  # noqa: T201
            raise RuntimeError(HOSTILE)
        return np.zeros(1, np.float32), 1.0, self.steps > 20, False, {HOSTILE: HOSTILE}
