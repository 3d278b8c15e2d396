"""What finished episodes looked like, under the names that RLlib's users know."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.schemas.batch import ChunkBatch
from headrace.schemas.chunk import ChunkEnd
from headrace.workers.fragment import OpenChunk
from headrace.workers.totals import RunnerTotals


class RunnerMetrics:
    """Steps and episodes as they are delivered; what a failure took away is counted by the totals, by name."""

    def __init__(self, totals: RunnerTotals) -> None:
        self._totals = totals
        self._reported_steps = 0
        self._returns: list[float] = []
        self._lengths: list[int] = []
        self._durations: list[float] = []
        self._finished: list[tuple[float, int]] = []
        self.steps_before = 0
        """Lifetime steps of earlier lives, as restored from a checkpoint."""
        self._episodes_lifetime = 0

    def add(self, chunks: Sequence[OpenChunk], batch: ChunkBatch) -> None:
        """`chunks` were delivered as the first rows of `batch`."""
        now = time.perf_counter()
        table = batch.table[: len(chunks)]
        done = (table["end"] == ChunkEnd.TERMINATED) | (table["end"] == ChunkEnd.TRUNCATED)
        returns, lengths = table["episode_return"][done].tolist(), table["episode_length"][done].tolist()
        self._returns += returns
        self._lengths += lengths
        self._finished += zip(returns, lengths, strict=True)
        self._durations += [now - chunks[i].episode.started_at for i in np.flatnonzero(done).tolist()]
        self._episodes_lifetime += len(returns)

    def take_finished(self) -> list[tuple[float, int]]:
        """(return, length) of each episode delivered whole since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def report(self) -> dict[str, Any]:
        """Everything since the last report, and lifetime sums. Episode figures are absent while no episode finished."""
        totals = self._totals
        report: dict[str, Any] = {
            "num_env_steps_sampled": totals.delivered - self._reported_steps,
            "num_env_steps_sampled_lifetime": self.steps_before + totals.delivered,
            "num_episodes": len(self._returns),
            "num_episodes_lifetime": self._episodes_lifetime,
            "num_env_step_failures_lifetime": totals.env_failures,
            "num_env_rebuilds_lifetime": totals.env_rebuilds,
            "num_env_steps_discarded_lifetime": sum(totals.discarded.values()),
        }
        self._reported_steps = totals.delivered
        for name, values in (("episode_return", self._returns), ("episode_len", self._lengths)):
            if values:
                report[f"{name}_mean"] = float(np.mean(values))
                report[f"{name}_min"], report[f"{name}_max"] = min(values), max(values)
        if self._durations:
            report["episode_duration_sec_mean"] = float(np.mean(self._durations))
        self._returns, self._lengths, self._durations = [], [], []
        return report
