"""Walks over spaces of every form, for tests that compare a vector of them with gymnasium's own."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np

_BOX = gym.spaces.Box(-1e3, 1e3, (3,), np.float32)
_PLANE = gym.spaces.Box(-1.0, 1.0, (2, 2), np.float32)
OBSERVATIONS: dict[str, gym.Space[Any]] = {
    "Box": _BOX,
    "Discrete": gym.spaces.Discrete(7, start=2),
    "Dict": gym.spaces.Dict({"at": _BOX, "place": gym.spaces.Discrete(7, start=2)}),
    "Tuple": gym.spaces.Tuple((_BOX, gym.spaces.MultiBinary(4))),
}
ACTIONS: dict[str, gym.Space[Any]] = {
    "Discrete": gym.spaces.Discrete(3),
    "Box": _PLANE,
    "Dict": gym.spaces.Dict({"way": gym.spaces.MultiDiscrete([2, 3]), "push": _PLANE}),
}


def numbers_of(value: Any) -> list[float]:
    """All numbers of an action, in order."""
    if isinstance(value, Mapping):
        return [number for part in value.values() for number in numbers_of(part)]
    return np.asarray(value, np.float64).ravel().tolist()


class SpaceWalk(gym.Env[Any, Any]):
    """A walk of its seed and its actions, over the spaces that `config` names.

    Episodes end by themselves, by a time limit, or by both at once. Infos hold a number in some steps, and the pid at a
    reset. The first env of lane `config["lane"]` does what `config["fault"]` says at step `config["at"]`.
    """

    def __init__(self, config: Any) -> None:
        self.observation_space = OBSERVATIONS[config.get("observation", "Box")]
        self.action_space = ACTIONS[config.get("action", "Discrete")]
        again = getattr(config, "recreated", False) and not config.get("again", False)
        self._fault = None if again or getattr(config, "vector_index", 0) != config.get("lane") else config["fault"]
        self._fault_at, self._steps = config.get("at", 5), 0

    def _observe(self) -> Any:
        box, place = self._at.astype(np.float32), np.int64(2 + int(abs(self._at[0]) * 10) % 7)
        parts = {"Box": box, "Discrete": place, "Dict": {"at": box, "place": place}}
        parts["Tuple"] = box, (np.abs(np.append(self._at, 0.1)) > 0.5).astype(np.int8)
        return next(parts[name] for name, space in OBSERVATIONS.items() if space is self.observation_space)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._at, self._time = self.np_random.normal(size=3), 0
        return self._observe(), {"first": float(self._at[0]), "pid": os.getpid()}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        self._steps, self._time = self._steps + 1, self._time + 1
        if self._fault is not None and self._steps >= self._fault_at:
            self._fail()
        self._at = self._at * 0.9 + self.np_random.normal(size=3) + sum(numbers_of(action))
        if self._fault == "has no reward" and self._steps >= self._fault_at:
            return self._observe(), float("nan"), False, False, {}
        info = {"half": self._time / 2} if self._time % 3 == 0 else {}
        done = bool(self.np_random.random() < 0.1)
        return self._observe(), float(self._at.sum()), done, self._time == 12 or (done and self._time % 2 == 0), info

    def _fail(self) -> None:
        if self._fault == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._fault == "raises":
            raise RuntimeError("diverged")
