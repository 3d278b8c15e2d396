"""The spaces that a policy is built for: those of its env, or those that a caller gives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import gymnasium as gym

from headrace.schemas.chunks.module_spaces import DEFAULT_MODULE_ID
from headrace.schemas.chunks.spaces import Spaces
from headrace.schemas.errors import ConfigError
from headrace.workers.annex_parts import part
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.context import EnvContext
from headrace.workers.envs.creators import build_env, find_creator, naming_what_failed
from headrace.workers.envs.driver import own_driver
from headrace.workers.envs.lane import close_envs
from headrace.workers.envs.spaces import convert, spaces_of
from headrace.workers.envs.vector_env import VectorEnv
from headrace.workers.policy.policies import Policies

ByModule = dict[str, Spaces]


@dataclass(frozen=True, slots=True)
class BuiltEnv:
    """An env that was built, and its spaces."""

    env: Any
    by_module: ByModule
    by_agent: Mapping[Any, Spaces]
    """Spaces by agent; empty where there is only one."""

    @property
    def own(self) -> Spaces:
        """Return the spaces of the only agent."""
        return self.by_module[DEFAULT_MODULE_ID]


@contextmanager
def built_env(config: EnvRunnerConfig) -> Iterator[BuiltEnv]:
    """Build the env of `config`, and close it at the end. Raises `EnvError` and `ConfigError`."""
    creator, context = find_creator(config.env), EnvContext(config.env_config)
    with naming_what_failed(config, 0):
        made = creator(context)
        try:
            yield _adapted(config, made, context)
        finally:
            close_envs([made] if hasattr(made, "close") else [])


def spaces_of_env(config: EnvRunnerConfig) -> tuple[ByModule, list[Any]]:
    """Build the env of `config` to read its spaces, and close it. Return (spaces by module, its possible agents).

    With one agent there are no ids of agents. Raises `EnvError` and `ConfigError`.
    """
    with built_env(config) as built:
        return built.by_module, list(built.by_agent)


def _adapted(config: EnvRunnerConfig, made: Any, context: EnvContext) -> BuiltEnv:
    """Return the env that a creator made, wrapped as workers use it."""
    env: Any = made
    if config.is_multi_agent:
        env, by_agent = part("adapted_agents")(made, context)
        return BuiltEnv(env, Policies.of(config).spaces(by_agent), by_agent)
    if isinstance(made, gym.vector.VectorEnv):
        return BuiltEnv(made, {DEFAULT_MODULE_ID: spaces_of(made, "single_")}, {})
    if own_driver(made) is None and not isinstance(made, VectorEnv):
        env = build_env(lambda _: made, context)
    return BuiltEnv(env, {DEFAULT_MODULE_ID: spaces_of(env)}, {})


def given_spaces(config: EnvRunnerConfig, given: Any) -> tuple[ByModule, list[Any]]:
    """Return (spaces by module, []) from a pair of gymnasium spaces, or a mapping of pairs by module id.

    Raises `ConfigError`.
    """
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
