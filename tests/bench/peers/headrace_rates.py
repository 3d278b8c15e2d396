"""Headrace's own rates: a runner, two workers with their broker, and transport alone.

PYTHONPATH=tests python tests/bench/peers/headrace_rates.py (sampling | workers | transport) CASE SECONDS
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from bare_loop_rates import first_load
from measuring import Take, main

from bench import limits, pipeline, transport
from bench.processes import Processes
from headrace.workers import EnvRunnerConfig, SingleAgentEnvRunner


@contextmanager
def sampling(case: str) -> Iterator[Take]:
    """Sample fragments as a worker does."""
    torch.set_num_threads(1)
    gc.freeze()
    config = EnvRunnerConfig(env=limits.ENV, num_envs=int(case), rollout_fragment_length=limits.HORIZON, seed=0)
    runner = SingleAgentEnvRunner(config)
    yield lambda: runner.sample_fragment().steps
    runner.stop()


@contextmanager
def workers(case: str) -> Iterator[Take]:
    """Read the batches of two workers."""
    with Processes() as processes, pipeline.Fleet(int(case), processes) as fleet:
        yield fleet.take


@contextmanager
def carrying(case: str) -> Iterator[Take]:
    """Read prebuilt batches."""
    with Processes() as processes, transport.Headrace(first_load(case), processes) as link:
        yield link.take


if __name__ == "__main__":
    main(sampling=sampling, workers=workers, transport=carrying)
