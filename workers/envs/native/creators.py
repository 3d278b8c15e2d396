"""The creator of a native vector: the user's, or gymnasium by the setting `gym_env_vectorize_mode`."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from headrace.schemas.errors import ConfigError
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.context import EnvContext
from headrace.workers.envs.creators import EnvCreator, build_env, find_creator, gym_spec
from headrace.workers.envs.native.construction import build_in_time


def vector_creator(config: EnvRunnerConfig) -> EnvCreator:
    """Return a function that builds the whole vector from the context of env 0.

    "sync" and "async" take any `config.env`, and reset each env with a seed of its own. "vector_entry_point" takes a
    gymnasium id that has one; for another it raises `ConfigError`.
    """
    mode = config.gym_env_vectorize_mode
    if mode is None:
        return find_creator(config.env)
    if mode == "vector_entry_point":
        spec = gym_spec(config.env) if isinstance(config.env, str) else None
        if spec is None or spec.vector_entry_point is None:
            message = f"vector_entry_point needs a gymnasium id that has one, and env is {config.env!r}"
            raise ConfigError(f"{message}; take sync or async", key="gym_env_vectorize_mode")
        return lambda context: gym.make_vec(
            spec, num_envs=context.num_envs, vectorization_mode="vector_entry_point", **context
        )
    creator = find_creator(config.env)
    if mode == "sync":
        return lambda context: SyncVectorEnv(_builders(creator, context), autoreset_mode=AutoresetMode.DISABLED)
    return partial(_async_vector, creator, config.env_construct_timeout_s)


def _builders(creator: EnvCreator, context: EnvContext) -> list[Callable[[], Any]]:
    return [partial(build_env, creator, context.at(index)) for index in range(context.num_envs)]


def _async_vector(creator: EnvCreator, timeout_s: float, context: EnvContext) -> Any:
    builders = _builders(creator, context)
    builders[0] = partial(build_in_time, builders[0], timeout_s, os.getpid())
    return AsyncVectorEnv(builders, autoreset_mode=AutoresetMode.DISABLED)
