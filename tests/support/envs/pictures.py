"""An env whose observations need some bandwidth."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np


class Pictures(gym.Env[Any, Any]):
    """Noise of its seed, of 12 kB a step."""

    observation_space: Any = gym.spaces.Box(0, 255, (64, 64, 3), np.uint8)
    action_space: Any = gym.spaces.Discrete(3)

    def __init__(self, config: Any = None) -> None:
        self._time = 0

    def _observe(self) -> Any:
        return self.np_random.integers(0, 256, (64, 64, 3), np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._time = 0
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        self._time += 1
        return self._observe(), float(action), False, self._time == 20, {}
