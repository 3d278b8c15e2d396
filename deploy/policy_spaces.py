"""The spaces that a policy is built for: those of its env, or those that a caller gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym

from headrace.schemas.errors import ConfigError
from headrace.schemas.module_spaces import DEFAULT_MODULE_ID
from headrace.schemas.spaces import Spaces
from headrace.workers.agents.env import gym_spaces_of, spaces_by_agent
from headrace.workers.agents.env_building import build_multi_agent_env
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.context import EnvContext
from headrace.workers.envs.creators import build_env, find_creator, naming_what_failed
from headrace.workers.envs.lane import close_envs
from headrace.workers.envs.spaces import convert, spaces_of, spaces_of_vector
from headrace.workers.envs.vector_env import VectorEnv
from headrace.workers.external.agents_env import ExternalMultiAgentEnv
from headrace.workers.external.env import ExternalEnv
from headrace.workers.policy.policies import Policies

ByModule = dict[str, Spaces]


def spaces_of_env(config: EnvRunnerConfig) -> tuple[ByModule, list[Any]]:
    """Build the env of `config` to read its spaces, and close it. Return (spaces by module, its possible agents).

    With one agent there are no ids of agents. Raises `EnvError` and `ConfigError`.
    """
    creator, context = find_creator(config.env), EnvContext(config.env_config)
    with naming_what_failed(config, 0):
        env = creator(context)
        try:
            if not config.is_multi_agent:
                return {DEFAULT_MODULE_ID: _spaces_of_one(env, context)}, []
            own = env if isinstance(env, ExternalMultiAgentEnv) else build_multi_agent_env(lambda _: env, context)
            by_agent = spaces_by_agent(gym_spaces_of(own))
        finally:
            close_envs([env] if hasattr(env, "close") else [], config.env_close_timeout_s)
    return Policies.of(config).spaces(by_agent), list(by_agent)


def _spaces_of_one(env: Any, context: EnvContext) -> Spaces:
    if isinstance(env, gym.vector.VectorEnv):
        return spaces_of_vector(env)
    if not isinstance(env, ExternalEnv | VectorEnv):
        built = env
        env = build_env(lambda _: built, context)
    return spaces_of(env)


def given_spaces(config: EnvRunnerConfig, given: Any) -> tuple[ByModule, list[Any]]:
    """Return the same from gymnasium spaces: a pair, or a mapping of pairs by module id. Raises `ConfigError`."""
    modules = list(Policies.of(config).specs) if config.is_multi_agent else [DEFAULT_MODULE_ID]
    by_module = given if isinstance(given, Mapping) else dict.fromkeys(modules, given)
    if sorted(by_module) != sorted(modules):
        raise ConfigError(f"has spaces of {sorted(by_module)!r:.200}; the policies are {sorted(modules)}", key="spaces")
    found = {}
    for module_id, pair in by_module.items():
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ConfigError(f"should be (observation space, action space), got {pair!r:.80}", key="spaces")
        found[module_id] = Spaces(
            observation=convert(pair[0], "observation space"), action=convert(pair[1], "action space")
        )
    return found, []
