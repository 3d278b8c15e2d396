"""Adapts the object that a creator returns to the dict protocol."""

from __future__ import annotations

import sys
from typing import Any

import gymnasium as gym

from headrace.schemas.errors import EnvContractError
from headrace.workers.agents.env import is_multi_agent
from headrace.workers.envs.context import EnvContext
from headrace.workers.envs.creators import EnvCreator
from headrace.workers.envs.ownership import claim


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
