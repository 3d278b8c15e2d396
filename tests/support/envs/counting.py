"""Envs that count, sound ones and others. They can be named in another process, where they need no torch."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np


class Counting(gym.Env[Any, Any]):
    """Observation: (t, vector index). Reward t. Ends after `length` steps, truncated if `truncate`."""

    observation_space: Any = gym.spaces.Box(0.0, 1e6, (2,), np.float32)
    action_space: Any = gym.spaces.Discrete(3)

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        config = config if config is not None else {}
        self.index = getattr(config, "vector_index", 0)
        self.config = config
        self.length = config.get("lengths", {}).get(self.index, config.get("length", 5))
        self.truncate = config.get("truncate", False)
        self.seeds: list[int | None] = config.get("seeds", [])
        self.closed = 0
        self.t = 0

    def observe(self) -> Any:
        return np.array([self.t, self.index], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.t = 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        self.t += 1
        over = self.t >= self.length
        return self.observe(), float(self.t), over and not self.truncate, over and self.truncate, {}

    def close(self) -> None:
        self.closed += 1


class FromFive(Counting):
    """Observations without a 0. The fourth step of env 1 fails, and env 2 may begin late."""

    observation_space = gym.spaces.Dict(
        count=gym.spaces.Discrete(3, start=5), others=gym.spaces.MultiDiscrete([2, 2], start=[-4, 7])
    )

    def observe(self) -> Any:
        return {"count": np.int64(5 + self.t % 3), "others": np.array([-3, 7])}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        time.sleep(self.config.get("late_s", 0.0) * (self.index == 2))
        return super().reset(seed=seed)

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        if self.index == 1 and self.t == 3:
            raise RuntimeError("diverged")
        return super().step(action)


LENGTHS = (3, 5, 4, 7)
"""The length of each env's episodes, by its index."""


class Counted(Counting):
    """A `Counting` whose episodes are as long as `LENGTHS` says."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.length = LENGTHS[self.index]


class Drawing(Counted):
    """Shows in all of an episode whether its reset had a seed, and a number that it drew then.

    With `config["fails"]`, episodes of some numbers fail in their second step.
    """

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.shown = np.array([seed is not None, self.np_random.integers(1_000_000)], np.float32)
        return self.observe(), {}

    def observe(self) -> Any:
        return self.shown.copy() if hasattr(self, "shown") else super().observe()

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        if self.config.get("fails") and self.t == 1 and self.shown[1] % 4 == 0:
            raise RuntimeError("failed")
        return super().step(action)


class Unsound(Counted):
    """Raises, or answers nonsense, at a chance of its own; now and then its reset does."""

    chance = np.random.default_rng(0)

    def reset(self, **settings: Any) -> Any:
        if settings.get("seed") is not None:
            self.chance = np.random.default_rng(settings["seed"])
        if self.chance.random() < 0.02:
            raise RuntimeError("no reset")
        return super().reset(**settings)

    def step(self, action: Any) -> Any:
        answer = super().step(action)
        fault = self.chance.random()
        if fault < 0.01:
            raise RuntimeError("no step")
        if fault < 0.02:
            return answer[0], float("nan"), *answer[2:]
        return (answer[0] - np.inf, *answer[1:]) if fault < 0.03 else answer


class Flier(Counted):
    """In every second episode of each env, leaves its Box from the second step on, and earns less.

    Its second value is the env's index, or 1e4 and the time in the episode outside the Box.
    """

    observation_space = gym.spaces.Box(0.0, 99.0, (2,), np.float32)

    @property
    def flies(self) -> bool:
        return len(self.seeds) % 2 == 0 and self.t >= 2

    def observe(self) -> Any:
        return np.array([self.t, 1e4 + self.t if self.flies else self.index], np.float32)

    def step(self, action: Any) -> Any:
        observation, reward, *ends = super().step(action)
        return observation, reward - 1000.0 * self.flies, *ends


class Spent(Counting):
    """Env 1 fails at the second step of every episode but its first."""

    def step(self, action: Any) -> Any:
        if self.index == 1 and self.t == 1 and (self.config.recreated or len(self.seeds) > 1):  # type: ignore[attr-defined]
            raise RuntimeError("only one episode is in it")
        return super().step(action)


class Broken(Counted):
    """Never makes a step."""

    def step(self, action: Any) -> Any:
        raise KeyError("always")


class NestedCounting(Counting):
    """Nested observations and actions, and an info with every third observation."""

    observation_space = gym.spaces.Dict(
        {"t": gym.spaces.Box(0.0, 1e6, (1,), np.float32), "pair": gym.spaces.Tuple((gym.spaces.Discrete(99),) * 2)}
    )
    action_space = gym.spaces.Dict({"a": gym.spaces.Discrete(2), "b": gym.spaces.Box(-1.0, 1.0, (2,))})

    def observe(self) -> Any:
        return {"t": np.array([self.t], np.float32), "pair": (self.t, 98 - self.t)}

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, _ = super().step(action)
        return observation, reward, terminated, truncated, {"t": self.t} if self.t % 3 == 0 else {}


class Interrupting(Counting):
    """Env 1 sends SIGINT to process `config["pid"]` in its fourth step, once: the file `config["once"]` says that."""

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        if self.index == 1 and self.t == 3 and not Path(self.config["once"]).exists():
            Path(self.config["once"]).touch()
            os.kill(self.config["pid"], signal.SIGINT)
        return super().step(action)


def interrupting_vector(kind: Any, config: Any) -> Any:
    """A vector of gymnasium's, with four `Interrupting`."""

    def build(index: int) -> Interrupting:
        env = Interrupting(dict(config))
        env.index = index
        return env

    return kind([partial(build, index) for index in range(4)])


class Numbered(gym.Env[Any, Any]):
    """Observation: (a random number of this env's life, a count of all its observations), so that no two are equal."""

    observation_space: Any = gym.spaces.Box(0.0, 1e15, (2,), np.float64)
    action_space: Any = gym.spaces.Discrete(2)

    def __init__(self, config: Any = None) -> None:
        self.life, self.count, self.left = int.from_bytes(os.urandom(6), "little"), 0, 0

    def observe(self) -> Any:
        self.count += 1
        return np.array([self.life, self.count], np.float64)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(3, 60))
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        self.left -= 1
        return self.observe(), 1.0, self.left <= 0, False, {}


class Paced(Numbered):
    """A `Numbered` of at most 500 steps a second."""

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        time.sleep(0.002)
        return super().step(action)
