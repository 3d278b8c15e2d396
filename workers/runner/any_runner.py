"""The runner that a config asks for: of one agent, or of several where it has policies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.workers.annex_parts import part
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.metrics.call_mark import CallMark
from headrace.workers.runner.env_runner import EnvRunner
from headrace.workers.runner.single_agent_env_runner import SingleAgentEnvRunner

AnyRunner = EnvRunner[Any]


def open_runner(
    config: EnvRunnerConfig,
    worker_index: int = 0,
    *,
    incarnation: int = 0,
    run_uid: str = "",
    on_wait: Callable[[str], None] | None = None,
    calls: CallMark | None = None,
) -> AnyRunner:
    """Build the runner for `config`. It takes and raises what `SingleAgentEnvRunner` or `MultiAgentEnvRunner` does."""
    kind = part("MultiAgentEnvRunner") if config.is_multi_agent else SingleAgentEnvRunner
    who: dict[str, Any] = {"incarnation": incarnation, "run_uid": run_uid}
    runner: AnyRunner = kind(config, worker_index, **who, on_wait=on_wait, calls=calls)
    if calls is not None and calls.sides is not None:
        calls.sides.keep()
    return runner
