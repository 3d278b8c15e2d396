"""The creator of a native vector (the user's, or gymnasium by `gym_env_vectorize_mode`), and the vector's kind."""

from __future__ import annotations

import os
from collections.abc import Callable
from enum import Enum
from functools import partial
from inspect import CO_OPTIMIZED
from itertools import pairwise
from traceback import walk_tb
from types import FrameType
from typing import Any

import gymnasium as gym
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from headrace.schemas.errors import ConfigError, EnvContractError
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.context import EnvContext
from headrace.workers.envs.creators import EnvCreator, build_env, find_creator, gym_spec
from headrace.workers.envs.ownership import refuse_twice
from headrace.workers.envs.task_reset import reset_with, task_setter
from headrace.workers.randomness.seeds import draw_global_seeds


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
    kind: Any = SyncVectorEnv if mode == "sync" else AsyncVectorEnv
    return lambda context: kind(_builders(creator, context), autoreset_mode=AutoresetMode.DISABLED)


def raised_in(error: BaseException) -> set[int]:
    """Return the env that raised `error` in a step of a gymnasium vector; none where the frames do not tell."""
    frames = [_names_in(frame) for frame, _ in walk_tb(error.__traceback__)]
    for names, called in pairwise([*frames, {}]):
        vector = names.get("self")
        if isinstance(vector, AsyncVectorEnv) and "index" in names:
            return {names["index"]}
        if isinstance(vector, SyncVectorEnv) and "i" in names and called.get("self") is vector.envs[names["i"]]:
            return {names["i"]}
    return set()


def _names_in(frame: FrameType) -> dict[str, Any]:
    """Return the variables of a function's frame by name; none of a module's."""
    known, is_function = frame.f_locals, frame.f_code.co_flags & CO_OPTIMIZED
    names = dict(known) if is_function else {}
    if is_function and isinstance(known, dict):  # before Python 3.13 the frame keeps the dict, and with it the env
        known.clear()
    return names


def _builders(creator: EnvCreator, context: EnvContext) -> list[Callable[[], Any]]:
    return [partial(_build, creator, context.at(index), os.getpid()) for index in range(context.num_envs)]


def _build(creator: EnvCreator, context: EnvContext, maker: int) -> Any:
    if os.getpid() != maker:
        draw_global_seeds()  # from Python 3.14 on, a server with the main program's modules has forked this process
    env = build_env(creator, context)
    return env if task_setter(env) is None else _Taught(env)


class _Taught(gym.Wrapper[Any, Any, Any, Any]):
    """Gives the task in the options of a reset to `set_task` of the env."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return reset_with(self.env, seed, options or None)


class Seeding(Enum):
    """The kinds of seeds that a vector's `reset(seed=...)` accepts."""

    EACH = "a list, with a seed for each env"
    ONE = "one seed for all of them"
    NONE = "nothing, since the vector was seeded when it was made"


def seeding_of(env: Any) -> Seeding:
    """Return which seeds the vector takes.

    Gymnasium documents lists for its own two kinds only. EnvPool takes seeds when it is made, and warns later.
    """
    if isinstance(env.unwrapped, SyncVectorEnv | AsyncVectorEnv):
        return Seeding.EACH
    if any(kind.__module__.partition(".")[0] == "envpool" for kind in type(env.unwrapped).__mro__):
        return Seeding.NONE
    return Seeding.ONE


def autoreset_of(env: Any) -> AutoresetMode:
    """Return when the vector resets an env whose episode has ended. Raises `EnvContractError` if that is unknown."""
    mode = (env.metadata or {}).get("autoreset_mode")
    if not isinstance(mode, AutoresetMode):
        raise EnvContractError(f"{_name(env)}.metadata['autoreset_mode']", repr(mode), "a gymnasium AutoresetMode")
    vector = env.unwrapped
    if isinstance(vector, AsyncVectorEnv) and mode is AutoresetMode.NEXT_STEP and not vector.shared_memory:
        # Without shared memory its processes do not forget a reset that is due, so that a reset would come twice.
        raise EnvContractError(
            "AsyncVectorEnv(shared_memory=False)", "autoreset_mode NEXT_STEP", "SAME_STEP or DISABLED, or shared memory"
        )
    return mode


def check_vector(env: Any, num_envs: int) -> None:
    """Raise `EnvContractError` unless `env` is a vector of `num_envs` envs."""
    if not isinstance(env, gym.vector.VectorEnv):
        raise EnvContractError("environment", _name(env), "a gymnasium.vector.VectorEnv")
    refuse_twice(getattr(env.unwrapped, "envs", ()) if isinstance(env.unwrapped, SyncVectorEnv) else ())
    if env.num_envs != num_envs:
        raise EnvContractError(
            f"num_envs of {_name(env)}", str(env.num_envs), f"{num_envs}, as num_envs of the config (context.num_envs)"
        )


def _name(env: Any) -> str:
    return f"{type(env).__module__}.{type(env).__qualname__}"
