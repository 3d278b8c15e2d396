"""The name of an env in another process, where a name can be sent but not the object itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson

from headrace.schemas.errors import ConfigError, MissingEnvError
from headrace.schemas.settings.plugins import load_object
from headrace.workers.envs.creators import registered_creator


def name_env(env: str | Callable[..., Any] | None) -> str:
    """Return the gymnasium id or "package.module:name" by which another process finds `env`.

    Raises `ConfigError` for what has no such name: a lambda, a closure, a bound object, an object of `__main__`.
    """
    if env is None:
        raise MissingEnvError
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
    """Return `env_config` as JSON for another process. Raises `ConfigError` for what JSON cannot hold."""
    try:
        return orjson.dumps(env_config, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as error:
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
