"""Several CartPoles in one env, in the dict protocol: each agent plays its own until all have fallen."""

from __future__ import annotations

from typing import Any

import gymnasium as gym

from headrace.workers import MultiAgentEnv

ENV = "CartPole-v1"


class MultiCartPole(MultiAgentEnv):
    """`config["agents"]` agents, named by number."""

    def __init__(self, config: Any) -> None:
        self._envs = {agent: gym.make(ENV) for agent in range(config["agents"])}
        self.possible_agents = list(self._envs)
        self.observation_spaces = {agent: env.observation_space for agent, env in self._envs.items()}
        self.action_spaces = {agent: env.action_space for agent, env in self._envs.items()}
        self._playing = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Reset all agents, each with a seed of its own."""
        self._playing = len(self._envs)
        observations = {}
        for agent, env in self._envs.items():
            observations[agent], _ = env.reset(seed=None if seed is None else (seed + agent) % 2**63)
        return observations, {}

    def step(self, actions: dict[Any, Any]) -> Any:
        """Step the agents that have not fallen."""
        observations, rewards, terminateds, truncateds = {}, {}, {}, {}
        for agent, action in actions.items():
            answer = self._envs[agent].step(action)
            observations[agent], rewards[agent], terminated, truncated, _ = answer
            terminateds[agent], truncateds[agent] = terminated, truncated
            self._playing -= terminated or truncated
        terminateds["__all__"], truncateds["__all__"] = self._playing == 0, False
        return observations, rewards, terminateds, truncateds, {}
