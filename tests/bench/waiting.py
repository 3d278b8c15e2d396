"""Cost of waiting: the share of a core that a sampler uses while its slow envs step, wherever they live.

A busy machine makes shares larger, though they are of processor time: its cores come back from others with cold caches.

PYTHONPATH=tests python -m bench.run --only waiting
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any

import torch

from bench import sleepers
from bench.processes import Processes
from bench.table import Row
from bench.turns import cpu_s
from headrace.workers import EnvRunnerConfig, SingleAgentEnvRunner
from headrace.workers.envs.remote.host.process import run_env_host

WIDTH = 4
MARK = 0.02
"""Largest share of a core that is aimed at."""
_STEPS_A_CALL = 2 * WIDTH
_READY: dict[str, dict[str, Any]] = {
    "all at once": {},
    "who is ready": {"remote_env_batch_wait_ms": 0},
    "by halves": {"double_buffering": True},
}


def measure(seconds: float, rounds: int) -> list[Row]:
    """One row for each place of the envs and each way to wait for them."""
    torch.set_num_threads(1)
    rows = [_row("external", "who is ready", _sampler("bench.sleepers:External"), seconds, rounds)]
    for how, settings in _READY.items():
        sampler = _sampler("bench.sleepers:Simulator", env_placement="process", envs_per_process=1, **settings)
        rows.append(_row("in processes", how, sampler, seconds, rounds))
    with Processes() as processes:
        for how, settings in _READY.items():
            folder = tempfile.mkdtemp(dir=processes.folder)
            processes.start(_lend, f"ipc://{folder}/envs-0")
            sampler = _sampler("bench.sleepers:Simulator", env_placement="remote", socket_dir=folder, **settings)
            rows.append(_row("on an env host", how, sampler, seconds, rounds))
    return rows


def _sampler(env: str, **settings: Any) -> SingleAgentEnvRunner:
    return SingleAgentEnvRunner(EnvRunnerConfig(env=env, num_envs=WIDTH, seed=0, **settings))


def _lend(endpoint: str) -> None:
    config = EnvRunnerConfig(
        env="bench.sleepers:Simulator", num_envs=WIDTH, env_placement="process", envs_per_process=1
    )
    run_env_host(config, endpoint, None)


def _row(where: str, how: str, sampler: SingleAgentEnvRunner, seconds: float, rounds: int) -> Row:
    """Of one sampler, whose process is this one."""
    with sampler:
        sampler.sample(num_timesteps=_STEPS_A_CALL)
        shares = [_share(lambda: sampler.sample(num_timesteps=_STEPS_A_CALL), seconds) for _ in range(rounds)]
    case = f"{WIDTH} envs of {sleepers.SLOW_S * 1000:g} ms, {where}"
    share, low, high = statistics.median(shares), min(shares), max(shares)
    return Row("waiting", case, how, "core ms/s", share * 1000, share, low, high, most=MARK)


def _share(wait: Callable[[], Iterable[Any]], seconds: float) -> float:
    start, before = perf_counter(), cpu_s([os.getpid()])
    while (elapsed := perf_counter() - start) < seconds:
        wait()
    return (cpu_s([os.getpid()]) - before) / elapsed
