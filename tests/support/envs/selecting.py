"""Envs whose bad episodes look odd, and that note in a file of their own each episode that they have lived."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

ENVS = itertools.count()


class Noting(gym.Wrapper[Any, Any, Any, Any]):
    """Writes (name, return) of an episode into the folder `lived` before its last step returns; infos have the name."""

    def __init__(self, env: gym.Env[Any, Any], lived: str) -> None:
        super().__init__(env)
        self._name = f"{os.getpid()}-{next(ENVS)}"
        self._file = Path(lived) / self._name
        self._episodes: Iterator[int] = itertools.count()
        self._return = 0.0

    def reset(self, **options: Any) -> Any:
        self._return = 0.0
        return super().reset(**options)

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = super().step(action)
        self._return += float(reward)
        if terminated or truncated:
            info = {**info, "lived": f"{self._name}-{next(self._episodes)}"}
            with self._file.open("a") as file:
                file.write(f"{info['lived']} {self._return!r}\n")
        return obs, reward, terminated, truncated, info


class Goal(gym.Env[Any, Any]):
    """Episodes of 5 steps with a return of 1, and a share of bad ones of 9 steps with a return of -1.

    `odd` says how the last step of a bad episode looks: "info" (a NaN in its info) or "box" (an observation outside).
    """

    observation_space, action_space = gym.spaces.Box(-1, 1, (1,)), gym.spaces.Discrete(2)

    def __init__(self, share: float, odd: str) -> None:
        self._share, self._odd = share, odd

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._steps, self._bad = 0, self.np_random.random() < self._share
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self._steps += 1
        over = self._steps == (9 if self._bad else 5)
        excess = 7.0 if over and self._bad and self._odd == "box" else 0.0
        info = {"time_to_goal": float("nan") if self._bad else 5.0} if over and self._odd == "info" else {}
        return np.full(1, excess, np.float32), float(over) * (-1 if self._bad else 1), over, False, info


class MainEngine(gym.ActionWrapper[Any, Any, Any]):
    """LunarLander-v3 that fires its main engine in a share of all steps: it flies up, out of its Box."""

    def __init__(self, share: float) -> None:
        super().__init__(gym.make("LunarLander-v3"))
        self._share = share

    def action(self, action: Any) -> Any:
        return 2 if self.np_random.random() < self._share else action


def goal(context: Any) -> gym.Env[Any, Any]:
    """Return a `Goal` that notes its episodes."""
    return Noting(Goal(context["share"], context["odd"]), context["lived"])


def lander(context: Any) -> gym.Env[Any, Any]:
    """Return a `MainEngine` that notes its episodes."""
    return Noting(MainEngine(context["share"]), context["lived"])
