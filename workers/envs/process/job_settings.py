"""The parts of a config that concern envs in other processes: the name of their env, their job, and their deadlines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from headrace.schemas.accounts import user_calls
from headrace.schemas.errors import ConfigError, missing_env_error
from headrace.schemas.settings.plugins import load_object
from headrace.schemas.settings.sampling_settings import ENV_CLOSE_TIMEOUT_S
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.checks import told_info
from headrace.workers.envs.creators import registered_creator
from headrace.workers.envs.process.control import Command, Phase


def name_env(env: str | Callable[..., Any] | None) -> str:
    """Return the gymnasium id or "package.module:name" by which another process finds `env`.

    Raises `ConfigError` for an env without such a name: a lambda, a closure, a bound object, an object of `__main__`.
    """
    if env is None:
        raise missing_env_error()
    if isinstance(env, str):
        registered = registered_creator(env)
        return env if registered is None else name_env(registered)
    module, name = getattr(env, "__module__", None), getattr(env, "__qualname__", None)
    if module is None or name is None or module == "__main__" or "<" in name:
        raise _unnamed(env, "it is no function or class at the top of an importable module")
    if load_object(f"{module}:{name}", "env") is not env:
        raise _unnamed(env, f"{module}:{name} is something else")
    return f"{module}:{name}"


def env_config_json(env_config: Mapping[str, Any]) -> bytes:
    """Return `env_config` as JSON for another process. Raises `ConfigError` for values that JSON cannot hold."""
    try:
        written = orjson.dumps(env_config, option=orjson.OPT_SERIALIZE_NUMPY)
        if written != told_info(dict(env_config)):
            raise ValueError("a number that is not finite, which JSON does not have, or nested too deep")
        return written
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"it cannot be sent to another process as JSON ({error}); give plain values, or env_placement = 'inline'",
            key="env_config",
        ) from error


def _unnamed(env: Any, why: str) -> ConfigError:
    return ConfigError(
        f"{env!r:.120} cannot be named to another process: {why}; give a gymnasium id, 'package.module:make_env', or "
        "env_placement = 'inline'",
        key="env",
    )


_LEAST_START_S = 60.0
"""The least time that a process has to start, which depends on the machine more than on its envs."""

SETTINGS = {Phase[call.name]: setting for call, setting in user_calls.SETTINGS.items()} | {
    Phase.IDLE: "env_step_timeout_s",
    Phase.CLOSE: "the time of a close()",
    Phase.START: f"max(2 * env_reset_timeout_s, {_LEAST_START_S:g} s)",
}
"""The time limit of each phase, in terms of settings."""


def job_of(config: EnvRunnerConfig, worker_index: int) -> dict[str, Any]:
    """Return the settings that the jobs of all processes share. Raises `ConfigError` for values that cannot be sent."""
    return {
        "env": name_env(config.env),
        "env_config": orjson.loads(env_config_json(config.env_config)),
        "worker_index": worker_index,
        "num_workers": config.num_workers,
        "num_envs": config.num_envs,
        "width": config.num_envs,
        "keeps_infos": config.infos == "all",
        "strict_bounds": config.strict_bounds,
        "several_agents": config.is_multi_agent,
        "close_timeout_s": ENV_CLOSE_TIMEOUT_S,
        "import_path": sys.path,
    }


def limits_of(config: EnvRunnerConfig) -> dict[Phase, float]:
    """Return how long each phase may last, in seconds."""
    return {Phase[call.name]: limit_s for call, limit_s in config.call_limits().items()} | {
        Phase.IDLE: config.env_step_timeout_s,
        # The process itself abandons a slow close(). The driver acts only if close() holds the interpreter lock.
        Phase.CLOSE: 2 * ENV_CLOSE_TIMEOUT_S,
        Phase.START: max(config.construct_timeout_s, _LEAST_START_S),
    }


def answer_limits(config: EnvRunnerConfig) -> Mapping[Command, float]:
    """Return how long a live env host may take to answer each command, in seconds.

    A host has deadlines of its own, kills an env that hangs, and answers with that failure. These limits only end the
    wait for a host that fails to do so: its own deadlines are longer, or it is broken.

    Envs that share a process take turns, so an order may wait for those of its neighbours. A step may include the reset
    after it.
    """
    phases = limits_of(config)
    turn_s = phases[Phase.STEP] + phases[Phase.RESET]
    waiting_s = config.envs_per_process * turn_s + config.env_hosts_lease_s
    building_s = waiting_s + phases[Phase.START] + config.envs_per_process * phases[Phase.CONSTRUCTION]
    return {Command.STEP: waiting_s, Command.RESET: waiting_s, Command.BUILD: building_s, Command.REBUILD: building_s}
