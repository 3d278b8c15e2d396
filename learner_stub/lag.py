"""Measures how old a learner's data is, in versions of the weights, and warns where it is too old."""

from __future__ import annotations

import logging
from collections import deque

from headrace.schemas.batch import ChunkBatch

log = logging.getLogger("headrace.learner")

_BATCHES = 32


class LagMonitor:
    """The lag of the newest batches. Batches sampled without the present learner's weights do not count.

    - warn_lag: mean lag of a batch above which it counts as late; None: no batch is late.
    """

    def __init__(self, warn_lag: float | None) -> None:
        self.late_batches = 0
        self._warn_lag = warn_lag
        self._recent: deque[tuple[int, int]] = deque(maxlen=_BATCHES)
        """(sum of the lag of all steps, steps) of each batch."""

    @property
    def mean(self) -> float:
        """Return the mean lag of the newest steps; 0.0 before the first."""
        steps = sum(steps for _, steps in self._recent)
        return sum(lag for lag, _ in self._recent) / steps if steps else 0.0

    def observe(self, batch: ChunkBatch, update_steps: int) -> None:
        """Count a batch that is handed out. Log a warning for the first late one, which names `update_steps`."""
        if not batch.steps or batch.learner_epoch != batch.newest[0]:
            return
        total = int(batch.lag.sum())
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
