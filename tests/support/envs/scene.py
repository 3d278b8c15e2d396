"""An env with a picture and an arm, whose steps fail now and then."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np


class Scene(gym.Env[Any, Any]):
    """Infos now and then. A step in twenty fails."""

    observation_space: Any = gym.spaces.Dict(
        camera=gym.spaces.Box(0, 255, (8, 8, 3), np.uint8),
        arm=gym.spaces.Tuple((gym.spaces.Box(-1, 1, (2, 3), np.float32), gym.spaces.Discrete(4))),
    )
    action_space: Any = gym.spaces.Dict(grip=gym.spaces.Discrete(2), move=gym.spaces.Box(-1, 1, (2,), np.float32))

    def __init__(self, context: Any = None) -> None:
        self.t = 0

    def _seen(self) -> Any:
        random = self.np_random
        arm = random.uniform(-1, 1, (2, 3)).astype(np.float32), random.integers(4)
        return {"camera": random.integers(0, 256, (8, 8, 3), np.uint8), "arm": arm}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self._seen(), {"start": True}

    def step(self, action: Any) -> Any:
        self.t += 1
        if self.np_random.random() < 0.05:
            raise RuntimeError("diverged")
        return self._seen(), self.np_random.normal(), self.t == 15, False, {"t": self.t} if self.t % 3 == 0 else {}
