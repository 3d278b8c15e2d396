"""What a multi-agent env is, and how whatever a creator built becomes one."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym

from headrace.schemas.errors import EnvContractError
from headrace.schemas.spaces import Spaces
from headrace.workers.envs.context import EnvContext
from headrace.workers.envs.creators import EnvCreator
from headrace.workers.envs.spaces import convert

ALL = "__all__"
"""The key under which `terminateds` and `truncateds` speak of the episode as a whole."""

AgentDict = dict[Any, Any]


class MultiAgentEnv:
    """An env of many agents, which speaks in dicts by agent id. A subclass or anything shaped like it will do.

    Agents with an observation act next; those without wait. An agent may come late, pause and return. Its action is
    answered by its next observation, with all rewards it got until then. Once `terminateds` or `truncateds` has its id
    it must not come back in that episode; `"__all__"` in either ends the episode.
    """

    possible_agents: Sequence[Any] = ()
    observation_spaces: Mapping[Any, Any] = {}
    action_spaces: Mapping[Any, Any] = {}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[AgentDict, AgentDict]:
        """(observations, infos) of the agents that begin."""
        raise NotImplementedError

    def step(self, actions: AgentDict) -> tuple[AgentDict, AgentDict, AgentDict, AgentDict, AgentDict]:
        """(observations, rewards, terminateds, truncateds, infos) after the actions of all agents that had to act."""
        raise NotImplementedError

    def close(self) -> None:
        """Release what the env holds."""


def build_multi_agent_env(creator: EnvCreator, context: EnvContext) -> Any:
    """One env with the dict protocol: the creator's own, or PettingZoo's made so. Its errors pass through."""
    built = creator(context)
    if "pettingzoo" in sys.modules:
        # Loaded by whoever built such an env, and not by us: PettingZoo is no dependency.
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


def is_multi_agent(env: Any) -> bool:
    """Whether `env` names its agents, which no single-agent env does."""
    return bool(getattr(env, "possible_agents", None)) and callable(getattr(env, "step", None))


def gym_spaces_of(env: Any) -> dict[Any, tuple[Any, Any]]:
    """Agent id -> (observation space, action space), as the env has them.

    Raises `EnvContractError` for agents that chunks could not tell apart, which name each by the text of its id.
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
    """From `name`s: a dict or a function of the agent; or from `name`, a function or a Dict space by agent."""
    for attribute in (f"{name}s", name, f"get_{name}"):
        found = getattr(env, attribute, None)
        if isinstance(found, Mapping | gym.spaces.Dict) and agent in found:
            return found[agent]
        if callable(found) and not isinstance(found, gym.Space):
            return found(agent)
    raise EnvContractError(f"{name} of agent {agent!r}", "missing", f"in env.{name}s[agent], or env.{name}(agent)")


def spaces_by_agent(gym_spaces: Mapping[Any, tuple[Any, Any]]) -> dict[Any, Spaces]:
    """The same as data; raises `EnvContractError` for a kind that no column can hold."""
    return {
        agent: Spaces(
            observation=convert(observation, f"observation space of agent {agent!r}"),
            action=convert(action, f"action space of agent {agent!r}"),
        )
        for agent, (observation, action) in gym_spaces.items()
    }
