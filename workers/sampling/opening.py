"""Which envs of one agent a config asks for, and at which pace they go on."""

from __future__ import annotations

from collections.abc import Callable

from headrace.workers.callbacks import CallbackList
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.driver import EnvDriver
from headrace.workers.envs.native.partial import PartialVector
from headrace.workers.envs.opening import open_envs, open_ready_envs
from headrace.workers.envs.pace import Pace
from headrace.workers.external.vector import ExternalVector
from headrace.workers.metrics.totals import RunnerTotals
from headrace.workers.randomness.seeds import SeedTree


def open_vector(
    config: EnvRunnerConfig,
    worker_index: int,
    seeds: SeedTree,
    totals: RunnerTotals,
    callbacks: CallbackList,
    on_wait: Callable[[], None] | None = None,
) -> tuple[EnvDriver, Pace]:
    """Return the envs that `config` asks for, built; for `on_wait` and errors see `open_envs`."""
    parts = config, worker_index, seeds, totals, callbacks
    if config.steps_the_ready:
        return open_ready_envs(*parts, on_wait), Pace.READY
    envs = open_envs(*parts, on_wait)
    if isinstance(envs, ExternalVector):
        return envs, Pace.EXTERNAL
    return envs, Pace.READY if isinstance(envs, PartialVector) else Pace.LOCK_STEP
