"""The settings of a runner: one frozen value object, checked when it is built."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ConfigDict, Field, ModelWrapValidatorHandler, ValidationError, model_validator

from headrace.schemas.config import FleetConfig
from headrace.schemas.errors import ConfigError
from headrace.schemas.sampling_settings import SamplingSettings

DEFAULT_MODULE = "headrace.workers.modules:actor_critic"


class EnvRunnerConfig(SamplingSettings):
    """Settings of one env runner. Raises `ConfigError` for an unknown field (naming the nearest) or a bad value.

    `SamplingSettings` has what a fleet's file can say. Envs and modules may also be given here as objects.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    env: str | Callable[..., Any] | None = None
    """Gymnasium id (also "module:Id-v0"), registered name, "package.module:make_env", class, callable(EnvContext).

    It creates one env, or all of them at once as a `gymnasium.vector.VectorEnv` or as Headrace's own `VectorEnv`.
    """
    num_envs: int = Field(default=1, ge=1, le=65_536)
    """Environments stepped together by one runner."""
    env_hosts_keys: str | None = None
    """Folder of the keys for the port of env hosts. None: the folder of HEADRACE_KEYS__DIR; "": no keys."""
    num_workers: int = Field(default=1, ge=0)
    """Number of runners in the fleet. It is passed to env creators and divides the metrics' smoothing window."""
    module: str | Callable[..., Any] = DEFAULT_MODULE
    """The policy: "package.module:build" or a callable, called as build(spaces, **module_config)."""
    module_config: dict[str, Any] = Field(default={})
    """Keyword arguments of the module's builder."""
    policies: Any = None
    """Multi-agent: module id -> policy, or just the ids.

    A policy is a PolicySpec, a table of build and config, a builder as in `module`, or None for `module` itself.
    """
    policy_mapping_fn: Any = None
    """Multi-agent: (agent id, episode id) -> module id, called once for each agent that appears in an episode.

    It may also be the function's "package.module:name", or a mapping from agent ids to module ids.
    """
    env_to_module: list[Any] = Field(default=[])
    """Pieces that observations pass on their way to the module: connectors, factories, or "package.module:factory"."""
    module_to_env: list[Any] = Field(default=[])
    """Pieces that actions pass on their way to the env, in the same forms."""
    callbacks: list[Any] = Field(default=[])
    """Classes, objects, {event: function or list of them}, or "package.module:name" of one; see `callbacks.py`."""

    @model_validator(mode="wrap")
    @classmethod
    def _translate_errors(cls, data: Any, handler: ModelWrapValidatorHandler[EnvRunnerConfig]) -> EnvRunnerConfig:
        if isinstance(data, Mapping):
            for key in data:
                if key not in cls.model_fields:
                    raise ConfigError(_unknown(key, list(cls.model_fields)), key=str(key))
        try:
            config = handler(data)
        except ValidationError as error:
            first = error.errors()[0]
            key = str(first["loc"][0]) if first["loc"] else None
            raise ConfigError(f"{first['msg']}, got {first['input']!r:.80}", key=key) from error
        return config


def runner_config(config: FleetConfig) -> EnvRunnerConfig:
    """Return the runner's settings in a fleet's. For a policy server, see `serving.served_env.served_config`."""
    return EnvRunnerConfig(
        **config.sampling.model_dump(),
        num_workers=config.fleet.workers,
        env_hosts_keys=config.keys.dir,
        module=config.module.build,
        module_config=config.module.config,
    )


def _unknown(key: Any, known: list[str]) -> str:
    near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)
    return f"no such setting of EnvRunnerConfig; the nearest is {near[0]!r}"
