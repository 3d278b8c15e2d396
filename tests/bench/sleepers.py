"""Envs that only take time, like a simulator, on any machine. Nothing here imports torch: envs get a process each."""

from __future__ import annotations

import time
from typing import Any

import gymnasium as gym
import numpy as np

from headrace.workers import EnvContext
from headrace.workers.external import ExternalEnv

STEP_S = 0.005
"""Seconds for a step of an env."""
SLOW_S = 0.2
"""Seconds for a step of a slow env."""
WIDTH = 16


class Sleeper(gym.Env[Any, Any]):
    """Sleeps at each step. Its episodes never end."""

    observation_space: Any = gym.spaces.Box(0.0, 1.0, (4,), np.float32)
    action_space: Any = gym.spaces.Discrete(2)
    step_s = STEP_S

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> Any:
        time.sleep(self.step_s)
        return np.zeros(4, np.float32), 0.0, False, False, {}


class Simulator(Sleeper):
    """Sleeps for long."""

    step_s = SLOW_S


class External(ExternalEnv):
    """`Simulator`s that drive themselves, one for each place of the runner."""

    def __init__(self, context: EnvContext) -> None:
        super().__init__(Sleeper.action_space, Sleeper.observation_space)
        self._games = context.num_envs

    def run(self) -> None:
        self.run_in_threads(self._play, self._games)

    def _play(self, number: int) -> None:
        env, episode = Simulator(), self.start_episode()
        observation, _ = env.reset()
        while True:
            observation, reward, *_ = env.step(self.get_action(episode, observation))
            self.log_returns(episode, reward)
