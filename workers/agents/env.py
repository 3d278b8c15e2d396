"""The dict protocol of multi-agent envs, the spaces of its agents, and how an env in that protocol is built."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym

from headrace.schemas.chunks.spaces import Spaces
from headrace.schemas.errors import EnvContractError
from headrace.workers.envs.context import EnvContext
from headrace.workers.envs.creators import EnvCreator
from headrace.workers.envs.ownership import claim
from headrace.workers.envs.spaces import convert

ALL = "__all__"
"""The key of `terminateds` and `truncateds` that concerns the episode as a whole."""

AgentDict = dict[Any, Any]


class MultiAgentEnv:
    """An env of many agents, which speaks in dicts by agent id. A subclass works, or any object with this interface.

    Agents with an observation act next; the others wait. An agent may come late, pause and return. Its next observation
    answers its action, with all rewards that it got until then. Once `terminateds` or `truncateds` has its id, it must
    not come back in that episode. `"__all__"` in either ends the episode.
    """

    possible_agents: Sequence[Any] = ()
    observation_spaces: Mapping[Any, Any] = {}
    action_spaces: Mapping[Any, Any] = {}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[AgentDict, AgentDict]:
        """Begin an episode, and return (observations, infos) of the agents that begin."""
        raise NotImplementedError

    def step(self, actions: AgentDict) -> tuple[AgentDict, AgentDict, AgentDict, AgentDict, AgentDict]:
        """Take the actions of all agents that had to act.

        Return (observations, rewards, terminateds, truncateds, infos).
        """
        raise NotImplementedError

    def close(self) -> None:
        """Release what the env holds."""


def is_multi_agent(env: Any) -> bool:
    """Return whether `env` names its agents, which no single-agent env does."""
    return bool(getattr(env, "possible_agents", None)) and callable(getattr(env, "step", None))


def gym_spaces_of(env: Any) -> dict[Any, tuple[Any, Any]]:
    """Return agent id -> (observation space, action space), as the env has them.

    Chunks name an agent by the text of its id. Raises `EnvContractError` for two agents with the same text.
    """
    names = [str(agent) for agent in env.possible_agents]
    if ALL in names:
        raise EnvContractError("possible_agents", f"{ALL!r}", "of names of their own: this one is the whole episode's")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise EnvContractError("possible_agents", f"{twice!r:.80} twice", "of different names, as text")
    return {
        agent: (_space(env, agent, "observation_space"), _space(env, agent, "action_space"))
        for agent in env.possible_agents
    }


def _space(env: Any, agent: Any, name: str) -> Any:
    """Return an agent's space: from `name`s, a dict or a function; or from `name`, a function or a Dict space."""
    for attribute in (f"{name}s", name, f"get_{name}"):
        found = getattr(env, attribute, None)
        if isinstance(found, Mapping | gym.spaces.Dict) and agent in found:
            return found[agent]
        if callable(found) and not isinstance(found, gym.Space):
            return found(agent)
    raise EnvContractError(f"{name} of agent {agent!r}", "missing", f"in env.{name}s[agent], or env.{name}(agent)")


def spaces_by_agent(gym_spaces: Mapping[Any, tuple[Any, Any]]) -> dict[Any, Spaces]:
    """Return the spaces as data. Raises `EnvContractError` for a kind that no column can hold."""
    return {
        agent: Spaces(
            observation=convert(observation, f"observation space of agent {agent!r}"),
            action=convert(action, f"action space of agent {agent!r}"),
        )
        for agent, (observation, action) in gym_spaces.items()
    }


def adapted_agents(made: Any, context: EnvContext) -> tuple[Any, dict[Any, Spaces]]:
    """Return the env that a creator made, with the dict protocol unless it drives itself, and its spaces by agent."""
    from headrace.workers.envs.driver import own_driver  # processes of envs start faster without it

    env = made if own_driver(made, several_agents=True) is not None else build_multi_agent_env(lambda _: made, context)
    return env, spaces_by_agent(gym_spaces_of(env))


def build_multi_agent_env(creator: EnvCreator, context: EnvContext) -> Any:
    """Return one env with the dict protocol. A PettingZoo env is adapted. Errors of the creator pass through."""
    built = creator(context)
    claim(built, context.life, context.vector_index, recreated=context.recreated)
    if "pettingzoo" in sys.modules:
        # The creator has loaded it. PettingZoo is no dependency of Headrace.
        from headrace.workers.agents.pettingzoo_envs import adapt

        built = adapt(built)
    if isinstance(built, gym.Env) and not is_multi_agent(built):
        built = built.unwrapped  # gymnasium.make wraps an env, and its wrappers hide `possible_agents`
    if not is_multi_agent(built):
        raise EnvContractError(
            "environment",
            f"{type(built).__module__}.{type(built).__qualname__}",
            "a MultiAgentEnv (possible_agents, reset and step with dicts) or a PettingZoo env; "
            "a single-agent env needs SingleAgentEnvRunner, whose config has no policies and no policy_mapping_fn",
        )
    return built
