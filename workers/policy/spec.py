"""How a config describes one of several policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """One module: what builds it, and for which spaces. What is None is taken from the config, or from its agents.

    `module`, `env_to_module` and `module_to_env` are as in `EnvRunnerConfig`; the spaces are gymnasium's, both or
    neither, and those of its agents, before any connector.
    """

    module: str | Callable[..., Any] | None = None
    module_config: Mapping[str, Any] | None = None
    observation_space: Any = None
    action_space: Any = None
    env_to_module: Sequence[Any] | None = None
    module_to_env: Sequence[Any] | None = None
