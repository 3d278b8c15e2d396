"""The description of one of several policies in a config."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """One module: its builder and its spaces.

    A field that is None is taken from the config, or from the module's agents. `module`, `env_to_module` and
    `module_to_env` are as in `EnvRunnerConfig`. Give both spaces or neither. They are gymnasium spaces, those of the
    module's agents before any connector.
    """

    module: str | Callable[..., Any] | None = None
    module_config: Mapping[str, Any] | None = None
    observation_space: Any = None
    action_space: Any = None
    env_to_module: Sequence[Any] | None = None
    module_to_env: Sequence[Any] | None = None
