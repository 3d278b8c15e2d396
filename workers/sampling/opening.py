"""Which envs of one agent a config asks for, and what samples them."""

from __future__ import annotations

from collections.abc import Callable

from headrace.workers.callbacks import CallbackList
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.native.partial import PartialVector
from headrace.workers.envs.opening import open_envs, open_ready_envs
from headrace.workers.external.vector import ExternalVector
from headrace.workers.metrics.totals import RunnerTotals
from headrace.workers.randomness.seeds import SeedTree
from headrace.workers.sampling.external_sampler import ExternalSampler
from headrace.workers.sampling.ready_sampler import ReadySampler
from headrace.workers.sampling.vector_sampler import VectorSampler


def open_sampler(
    config: EnvRunnerConfig,
    worker_index: int,
    seeds: SeedTree,
    totals: RunnerTotals,
    id_high: int,
    callbacks: CallbackList,
    on_wait: Callable[[], None] | None = None,
) -> VectorSampler:
    """What steps the envs that `config` asks for, or answers them; for `on_wait` and errors see `open_envs`."""
    parts = config, worker_index, seeds, totals, callbacks
    if config.steps_the_ready:
        return ReadySampler(config, open_ready_envs(*parts, on_wait), totals, id_high, callbacks)
    envs = open_envs(*parts, on_wait)
    if isinstance(envs, PartialVector):  # which only its creator knew
        return ReadySampler(config, envs, totals, id_high, callbacks)
    if isinstance(envs, ExternalVector):
        return ExternalSampler(config, envs, totals, id_high, callbacks)
    return VectorSampler(config, envs, totals, id_high, callbacks)
