"""A multi-agent env to try a fleet with: `--env headrace.workers.agents.examples:two_carts`."""

from __future__ import annotations

from typing import Any

import gymnasium as gym

from headrace.workers.agents.env import AgentDict, MultiAgentEnv
from headrace.workers.envs.context import EnvContext

_POLE = {"short": 0.5, "long": 1.5}
"""Agent -> half the length of its pole, in m; CartPole's own is 0.5."""


class TwoCarts(MultiAgentEnv):
    """Two CartPoles side by side. "short" is CartPole-v1 itself; "long" has a pole that is heavier and falls slower.

    An agent is done when its pole falls, or after 500 steps. The episode is over when both are. A reward is 1 a step.
    """

    def __init__(self) -> None:
        self._carts = {agent: _cart(pole) for agent, pole in _POLE.items()}
        self._playing: set[str] = set()
        self.possible_agents = list(self._carts)
        self.observation_spaces = {agent: cart.observation_space for agent, cart in self._carts.items()}
        self.action_spaces = {agent: cart.action_space for agent, cart in self._carts.items()}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[AgentDict, AgentDict]:
        """Begin with both agents, each with a seed of its own."""
        self._playing = set(self._carts)
        observations = {}
        for number, (agent, cart) in enumerate(self._carts.items()):
            own = None if seed is None else 2 * seed + number
            observations[agent], _ = cart.reset(seed=own)
        return observations, {}

    def step(self, actions: AgentDict) -> tuple[AgentDict, AgentDict, AgentDict, AgentDict, AgentDict]:
        """Move the carts of `actions`, whose poles still stand."""
        observations, rewards, terminateds, truncateds = {}, {}, {}, {}
        for agent, action in actions.items():
            answer = self._carts[agent].step(action)
            observations[agent], rewards[agent], terminateds[agent], truncateds[agent], _ = answer
            if terminateds[agent] or truncateds[agent]:
                self._playing.discard(agent)
        terminateds["__all__"], truncateds["__all__"] = not self._playing, False
        return observations, rewards, terminateds, truncateds, {}

    def close(self) -> None:
        """Close both envs."""
        for cart in self._carts.values():
            cart.close()


def two_carts(context: EnvContext) -> TwoCarts:
    """Return the env; it takes no env_config."""
    return TwoCarts()


def _cart(pole: float) -> gym.Env[Any, Any]:
    env = gym.make("CartPole-v1", disable_env_checker=True)
    cart: Any = env.unwrapped
    cart.masspole *= pole / cart.length
    cart.length = pole
    cart.total_mass = cart.masscart + cart.masspole
    cart.polemass_length = cart.masspole * cart.length
    return env
