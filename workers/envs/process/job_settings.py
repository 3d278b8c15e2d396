"""The parts of a config that concern env processes: their job, and their deadlines."""

from __future__ import annotations

import sys
from typing import Any

import orjson

from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.process.control import Phase
from headrace.workers.envs.process.naming import env_config_json, name_env

_LEAST_START_S = 60.0
"""The least time that a process has to start, which depends on the machine more than on its envs."""

SETTINGS = {
    Phase.IDLE: "env_step_timeout_s",
    Phase.CONSTRUCTION: "env_construct_timeout_s",
    Phase.RESET: "env_reset_timeout_s",
    Phase.STEP: "env_step_timeout_s",
    Phase.CLOSE: "env_close_timeout_s",
    Phase.RENDER: "env_step_timeout_s",
    Phase.START: f"max(env_construct_timeout_s, {_LEAST_START_S:g} s)",
}
"""The setting that limits each phase."""


def job_of(config: EnvRunnerConfig, worker_index: int) -> dict[str, Any]:
    """Return what the jobs of all processes have in common. Raises `ConfigError` for what cannot be sent."""
    return {
        "env": name_env(config.env),
        "env_config": orjson.loads(env_config_json(config.env_config)),
        "worker_index": worker_index,
        "num_workers": config.num_workers,
        "num_envs": config.num_envs,
        "width": config.num_envs,
        "check_bounds": not config.disable_env_checking,
        "several_agents": config.is_multi_agent,
        "close_timeout_s": config.env_close_timeout_s,
        "import_path": sys.path,
    }


def limits_of(config: EnvRunnerConfig) -> dict[Phase, float]:
    """Return how long each phase may last, in seconds."""
    limits: dict[Phase, float] = {
        phase: getattr(config, setting) for phase, setting in SETTINGS.items() if phase is not Phase.START
    }
    limits[Phase.START] = max(config.env_construct_timeout_s, _LEAST_START_S)
    # The process itself abandons a slow close(). The driver acts only if close() holds the interpreter lock.
    limits[Phase.CLOSE] *= 2
    return limits
