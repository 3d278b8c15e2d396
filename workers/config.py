"""What a runner may be told: one frozen value object, checked when it is built."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, ValidationError, model_validator

from headrace.schemas.errors import ConfigError

DEFAULT_MODULE = "headrace.workers.modules:actor_critic"


class MissingEnvError(ConfigError, ValueError):
    """An env is needed and the config names none."""

    def __init__(self) -> None:
        super().__init__(
            "no environment is configured; give EnvRunnerConfig(env=...) a gymnasium id, a registered name, "
            "'package.module:make_env', a class, or a callable that takes an EnvContext",
            key="env",
        )


class EnvRunnerConfig(BaseModel):
    """Settings of one env runner. Raises `ConfigError` for an unknown field (naming the nearest) or a bad value."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    env: str | Callable[..., Any] | None = None
    """Gymnasium id (also "module:Id-v0"), registered name, "package.module:make_env", class, callable(EnvContext)."""
    env_config: dict[str, Any] = {}
    """Reaches the env's creator: as keyword arguments of a gymnasium id, as the `EnvContext` of a callable."""
    num_envs: int = Field(default=1, ge=1, le=65_536)
    """Environments stepped together by one runner."""
    num_workers: int = Field(default=1, ge=0)
    """Runners in the fleet; only told to env creators."""
    seed: int | None = Field(default=None, ge=0)
    """Root of every random number of the fleet's runners; None takes fresh entropy."""
    max_env_seed: int = Field(default=2**63 - 1, ge=1, lt=2**63)
    """Largest seed given to `env.reset`; 2**32 - 1 for envs that take only 32 bits (seeds then repeat by chance)."""

    batch_mode: Literal["truncate_episodes", "complete_episodes"] = "truncate_episodes"
    """Cut fragments after a number of steps, or deliver whole episodes only."""
    rollout_fragment_length: int = Field(default=128, ge=1)
    """Env steps of each env in a fragment, when episodes may be cut."""
    explore: bool = True
    """Sample from the policy's distribution; False takes its mode."""
    infos: Literal["all", "none"] = "all"
    """Whether the env's non-empty infos travel with the chunks."""

    module: str | Callable[..., Any] = DEFAULT_MODULE
    """The policy: "package.module:build" or a callable, called as build(spaces, **module_config)."""
    module_config: dict[str, Any] = {}
    """Keyword arguments of the module's builder."""
    torch_threads: int = Field(default=1, ge=1)
    """Threads torch may use in this process; the runner sets it when it is built."""

    disable_env_checking: bool = False
    """Skip the check of observations against the bounds of their space; shape and dtype are always checked."""
    restart_failed_sub_environments: bool = True
    """Rebuild an env that failed and go on; False raises its error out of `sample`."""
    env_close_timeout_s: float = Field(default=5.0, gt=0)
    """Seconds an env's close() may take before it is abandoned with a warning."""
    env_restart_attempts: int = Field(default=8, ge=1)
    """Failures in a row, nothing delivered between them, that one env is forgiven."""
    env_restart_backoff_s: float = Field(default=0.05, ge=0)
    """Seconds waited before the second rebuild in a row, doubled for each further one."""
    env_restart_backoff_max_s: float = Field(default=5.0, ge=0)
    """Longest such wait, in seconds."""
    max_env_restarts_per_window: int = Field(default=600, ge=1)
    """Rebuilds of one env that `env_restart_window_s` may see, delivered or not."""
    env_restart_window_s: float = Field(default=60.0, gt=0)
    """Length of that window, in seconds."""

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
        if config.env_restart_backoff_s > config.env_restart_backoff_max_s:
            raise ConfigError(
                f"env_restart_backoff_s = {config.env_restart_backoff_s:g} is more than "
                f"env_restart_backoff_max_s = {config.env_restart_backoff_max_s:g}; lower it or raise the other",
                key="env_restart_backoff_s",
            )
        return config


def _unknown(key: Any, known: list[str]) -> str:
    near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)
    return f"no such setting of EnvRunnerConfig; the nearest is {near[0]!r}"
