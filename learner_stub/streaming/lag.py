"""Measures how old a learner's data is, in versions of the weights, and warns where it is too old."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable

import numpy as np

from headrace.schemas.accounts.lag_buckets import LAG_BOUNDS, LAG_BUCKETS
from headrace.schemas.chunks.batch import ChunkBatch

log = logging.getLogger("headrace.learner")

_BATCHES = 32
_BOUNDS = np.array(LAG_BOUNDS)


class LagMonitor:
    """The lag of the batches that are handed out, in the mean of the newest and in counts of all.

    Batches of random actions, from before the first weights, do not count in the mean.

    - warn_lag: mean lag of a batch above which it counts as late; None: no batch is late.
    """

    def __init__(self, warn_lag: float | None) -> None:
        self.late_batches = 0
        self._warn_lag = warn_lag
        self._recent: deque[tuple[int, int]] = deque(maxlen=_BATCHES)
        """(sum of the lag of all steps, steps) of each batch."""
        self._counts = np.zeros(LAG_BUCKETS, np.int64)

    @property
    def recent(self) -> tuple[int, int]:
        """Return the sum of the lag of the newest steps, and their number."""
        return sum(lag for lag, _ in self._recent), sum(steps for _, steps in self._recent)

    @property
    def counts(self) -> list[int]:
        """Return the steps in each bucket of `lag_buckets.py`, since the stream opened."""
        counts: list[int] = self._counts.tolist()
        return counts

    def _count(self, batch: ChunkBatch) -> int:
        """Count the steps by their lag, and return the sum. Most batches have one lag, and are counted at once."""
        seqs, (epoch, newest) = batch.arrays["weights_seq"], batch.newest
        first = int(seqs[0])
        if batch.learner_epoch != epoch or not np.count_nonzero(seqs != first):
            one = newest if batch.learner_epoch != epoch else max(newest - first, 0)
            self._counts[bisect_left(LAG_BOUNDS, one)] += batch.steps
            return one * batch.steps
        lag = batch.lag
        self._counts += np.bincount(np.searchsorted(_BOUNDS, lag), minlength=LAG_BUCKETS)
        return int(lag.sum())

    def observe(self, batch: ChunkBatch, update_steps: int) -> None:
        """Count a batch that is handed out. Log a warning for the first late one, which names `update_steps`."""
        if not batch.steps:
            return
        total = self._count(batch)
        if batch.learner_epoch == 0:
            return
        self._recent.append((total, batch.steps))
        if self._warn_lag is None or total <= self._warn_lag * batch.steps:
            return
        self.late_batches += 1
        if self.late_batches == 1:
            log.warning(
                "a batch of %d steps from slot %d was sampled %.1f versions behind the newest weights, more than "
                "warn_lag = %g; an update takes %d steps: publish less often, gather more steps for an update, lower "
                "sampling.rollout_fragment_length or num_envs, leave worker.window_batches unset, or ask for "
                "synchronous sampling; further ones are only counted, in late_batches",
                batch.steps,
                batch.slot,
                total / batch.steps,
                self._warn_lag,
                update_steps,
            )


def mean_lag(monitors: Iterable[LagMonitor]) -> float:
    """Return the mean lag of the newest steps of all these monitors; 0.0 before the first."""
    recent = [monitor.recent for monitor in monitors]
    steps = sum(steps for _, steps in recent)
    return sum(lag for lag, _ in recent) / steps if steps else 0.0
