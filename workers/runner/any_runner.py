"""The runner that a config asks for: of one agent, or of several where it has policies."""

from __future__ import annotations

from typing import Any

from headrace.workers.config import EnvRunnerConfig
from headrace.workers.runner.multi_agent_env_runner import MultiAgentEnvRunner
from headrace.workers.runner.single_agent_env_runner import SingleAgentEnvRunner

AnyRunner = SingleAgentEnvRunner | MultiAgentEnvRunner


def open_runner(config: EnvRunnerConfig, worker_index: int = 0, **identity: Any) -> AnyRunner:
    """Build the runner for `config`. It takes and raises what `SingleAgentEnvRunner` or `MultiAgentEnvRunner` does."""
    kind = MultiAgentEnvRunner if config.is_multi_agent else SingleAgentEnvRunner
    return kind(config, worker_index, **identity)
