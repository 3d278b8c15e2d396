"""Envs that a worker gets nothing from: each fails always, or never ends an episode."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np


class Stormy(gym.Env[Any, Any]):
    """`config["fails"]` says what raises every time: "reset", "step", or from the first rebuild on "construction".

    With None nothing does, and its episodes never end.
    """

    def __init__(self, config: Any) -> None:
        self.observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
        self.action_space = gym.spaces.Discrete(2)
        self._fails = config["fails"]
        if config.recreated:
            self._fail_in("construction")

    def _fail_in(self, call: str) -> None:
        if self._fails == call:
            raise RuntimeError(f"no {call} in this weather")

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._fail_in("reset")
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self._fail_in("step")
        if self._fails == "construction":
            raise RuntimeError("to be built again")
        return np.ones(1, np.float32), 1.0, False, False, {}
