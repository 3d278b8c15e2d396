"""An env with planted crashes: the seed of a reset says whether the episode crashes, and at which step."""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

import gymnasium as gym
import numpy as np

from headrace.workers import MultiAgentEnv

LENGTH = 60


def planted_step(seed: int) -> int:
    """Return the step at which an episode crashes, or one after its end."""
    return 3 + seed % (LENGTH * 3 // 2)


class Planted(gym.Env[Any, Any]):
    """`kind`: what the crash is. `noisy_from`: the step from which on observations do not depend on the seed.

    Its picture is as bright as the steps are many.
    """

    def __init__(self, env_config: Any) -> None:
        self.observation_space = gym.spaces.Dict(
            {
                "near": gym.spaces.Box(-np.inf, np.inf, (3,), np.float32),
                "far": gym.spaces.Discrete(1000),
            }
        )
        self.action_space = gym.spaces.Discrete(4)
        self.render_mode = env_config.get("render_mode")
        self._kind = env_config["kind"]
        self._made_as = env_config.vector_index + 10 * env_config.worker_index + (env_config.seed or 0) % 97
        self._noisy_from = env_config.get("noisy_from", LENGTH)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        assert seed is not None
        self._crash_at, self._step, self._sum = planted_step(seed), 0, 0
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        self._step += 1
        self._sum += int(action)
        if self._step == self._crash_at:
            return self._crash()
        return self._observation(), self._sum / 7, False, self._step == LENGTH, {}

    def render(self) -> Any:
        return np.full((32, 48, 3), 4 * self._step, np.uint8)

    def _observation(self) -> dict[str, Any]:
        far = int(self.np_random.integers(1000))
        if self._step >= self._noisy_from:
            far = int.from_bytes(os.urandom(2)) % 1000
        return {
            "near": np.full(3, self._sum + self._made_as, np.float32) + self.np_random.random(3, np.float32),
            "far": far,
        }

    def _crash(self) -> Any:
        match self._kind:
            case "raise":
                raise ValueError(f"planted after {self._sum}")
            case "shape":
                return {"near": np.zeros(4, np.float32), "far": 0}, 0.0, False, False, {}
            case "exit":
                os._exit(3)
            case "segfault":
                ctypes.string_at(0)
        time.sleep(3600)
        return None


def near(env_config: Any) -> Any:
    """Return an env that shows a part of the observations."""
    space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    return gym.wrappers.TransformObservation(Planted(env_config), lambda seen: seen["near"], space)


class PlantedTeam(MultiAgentEnv):
    """A planted env whose agents act by turns: 0 and 1, 1 alone, then all three. Agent 0 ends at step 20."""

    def __init__(self, env_config: Any) -> None:
        self._env = Planted(env_config)
        self.render_mode, self.render = self._env.render_mode, self._env.render
        self.possible_agents = ["a", "b", "c"]
        self.observation_spaces = dict.fromkeys(self.possible_agents, self._env.observation_space["near"])
        self.action_spaces = dict.fromkeys(self.possible_agents, self._env.action_space)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._t, (seen, _) = 0, self._env.reset(seed=seed)
        return dict.fromkeys(self._acting(), seen["near"]), {}

    def _acting(self) -> list[str]:
        acting = [["a", "b"], ["b"], ["a", "b", "c"]][self._t % 3]
        return [agent for agent in acting if agent != "a" or self._t < 20]

    def step(self, actions: dict[Any, Any]) -> Any:
        self._t += 1
        seen, reward, _, over, _ = self._env.step(sum(3**i * int(a) for i, a in enumerate(actions.values())))
        ends = {"a": True} if self._t == 20 else {}
        observed = dict.fromkeys(self._acting(), seen["near"])
        rewards = dict.fromkeys(observed, reward)
        return observed, rewards, {**ends, "__all__": over}, {}, {}
