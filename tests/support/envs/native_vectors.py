"""Makers of native vectors of toy envs, by kind and autoreset mode."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from headrace.schemas.chunks.chunk import to_episode
from headrace.workers import EnvContext

KINDS = {"sync": SyncVectorEnv, "async": AsyncVectorEnv}
EVERY_KIND = [(kind, mode) for kind in KINDS for mode in AutoresetMode]


def vector_of(env: Callable[[EnvContext], Any], kind: str, mode: AutoresetMode, **settings: Any) -> Any:
    """A creator of a vector of `env`s."""
    return lambda context: KINDS[kind](
        [partial(env, context.at(index)) for index in range(context.num_envs)], autoreset_mode=mode, **settings
    )


def lives(sampler: Any, polls: int) -> dict[int, list[Any]]:
    """Whole episodes by env, and the open one as far as it got."""
    chunks = [chunk for _ in range(polls) for chunk in sampler.sample_fragment()]
    episodes: dict[str, list[Any]] = {}
    for chunk in chunks:
        episodes.setdefault(chunk.episode_id, []).append(chunk)
    by_env: dict[int, list[Any]] = {}
    for parts in episodes.values():
        by_env.setdefault(parts[0].env_index, []).append(to_episode(sorted(parts, key=lambda c: c.chunk_index)))
    return by_env


class Telling(gym.Env[Any, Any]):
    """Every reset and each second step has an info; observations and actions are nested."""

    observation_space = gym.spaces.Dict(
        {"t": gym.spaces.Discrete(100), "place": gym.spaces.Tuple((gym.spaces.Box(0, 9, (2, 2), np.float32),))}
    )
    action_space = gym.spaces.Dict({"turn": gym.spaces.Discrete(3), "push": gym.spaces.Box(-1, 1, (2,), np.float32)})

    def __init__(self, config: Any) -> None:
        self.index = config.vector_index
        self.t = 0

    def observe(self) -> Any:
        return {"t": np.int64(self.t), "place": (np.full((2, 2), self.index, np.float32),)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.t = 0
        return self.observe(), {"began": self.index}

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        assert self.action_space.contains(action)
        self.t += 1
        info: dict[str, Any] = {"t": self.t, "deep": {"word": f"{self.index}-{self.t}"}} if self.t % 2 else {}
        return self.observe(), float(action["turn"]), self.t == 3 + self.index, False, info


def tensors(value: Any) -> Any:
    """The value with torch tensors in place of its arrays of numbers, as simulators on GPUs answer."""
    if isinstance(value, dict):
        return {key: tensors(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(map(tensors, value))
    return torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" else value


class InTensors(gym.vector.VectorWrapper):
    """Another vector that answers in tensors, and leaves its masks as they are."""

    def reset(self, **given: Any) -> Any:
        return tensors(self.env.reset(**given))

    def step(self, actions: Any) -> Any:
        return tensors(self.env.step(actions))


class CountsInTensors(gym.vector.VectorEnv):
    """Lane i has episodes of i + 2 steps, and observes the step, from 1 on. Rows that are not reset are NaN."""

    metadata: ClassVar[dict[str, Any]] = {"autoreset_mode": AutoresetMode.DISABLED}

    def __init__(self, num_envs: int, xp: Any = torch) -> None:
        self.num_envs, self.xp = num_envs, xp
        self.t = xp.zeros(num_envs)
        self.single_observation_space = gym.spaces.Box(0, 100, (1,))
        self.single_action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, Any]:
        mask = (options or {}).get("reset_mask", self.t > -1)
        self.t = self.xp.where(mask, self.xp.ones_like(self.t), self.t)
        seen = self.xp.where(mask, self.t, self.xp.full_like(self.t, np.nan))
        return self._see(seen), {"t": self.t}

    def step(self, actions: Any) -> tuple[Any, ...]:
        self.t = self.t + 1
        over = self.t >= self.xp.arange(self.num_envs) + 3
        return self._see(self.t), self.t, over, over & False, {"t": self.t}

    def _see(self, t: Any) -> Any:
        return (t.float() if self.xp is torch else t.astype(np.float32))[:, None]
