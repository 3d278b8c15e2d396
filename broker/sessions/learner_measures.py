"""Gauges of the learner, which measures itself: its time by part, its process, and the lag of steps handed out."""

from __future__ import annotations

from collections import deque

from headrace.broker.batches.life_figures import RecentUsage
from headrace.schemas.accounts.lag_buckets import LAG_BUCKETS, up_to
from headrace.schemas.accounts.redis_keys import CONSUMED_LAG, LEARNER_TIME, labelled
from headrace.schemas.messages import LearnerFigures
from headrace.schemas.messages.learner_messages import LEARNER_PARTS

WINDOW_S = 10.0
"""Seconds of the learner's time over which the shares of its parts are taken, at least."""

_SAMPLE_S = 0.25

Times = tuple[float, ...]
"""Seconds of each of `LEARNER_PARTS`."""


class LearnerMeasures:
    """Figures of the learner that holds the lease, sent as cumulative values.

    Call `begin` when another learner gets it.
    """

    def __init__(self) -> None:
        self._consumed = [0] * LAG_BUCKETS
        """Steps handed out by lag, since this broker started."""
        self._told: list[int] | None = None
        """Steps by lag as the learner reported them last, since it opened its stream; None: not known."""
        self._times: deque[Times] = deque(maxlen=int(WINDOW_S / _SAMPLE_S) + 2)
        self.usage = RecentUsage()
        self._threads = (0, 0)

    def begin(self, *, is_new: bool) -> None:
        """Forget the last learner's figures.

        If the present one is not new, its first figures count steps before this broker.
        """
        self._told = [0] * LAG_BUCKETS if is_new else None
        self._times.clear()
        self.usage = RecentUsage()
        self._threads = (0, 0)

    def take(self, figures: LearnerFigures, now: float) -> None:
        """Take newer figures."""
        self.usage.take(figures.usage, now)
        self._threads = figures.torch_threads, figures.cores
        if len(figures.consumed_lag) == LAG_BUCKETS:
            self._take_lag(figures.consumed_lag)
        if figures.time_spent.keys() >= set(LEARNER_PARTS):
            self._take_times(tuple(figures.time_spent[part] for part in LEARNER_PARTS))

    def _take_lag(self, counts: list[int]) -> None:
        if self._told is not None:
            grown = [count - before for count, before in zip(counts, self._told, strict=True)]
            self._consumed = [count + more for count, more in zip(self._consumed, grown, strict=True)]
        self._told = counts

    def _take_times(self, times: Times) -> None:
        if self._times and sum(times) - sum(self._times[-1]) < _SAMPLE_S:
            return
        self._times.append(times)
        while len(self._times) > 2 and sum(times) - sum(self._times[1]) >= WINDOW_S:
            self._times.popleft()

    def threads(self) -> dict[str, int]:
        """Return how many threads torch uses in it, and the cores that it may use; zeros where it does not tell."""
        return dict(zip(("torch_threads", "cores"), self._threads, strict=True))

    def consumed_lag(self) -> dict[str, float]:
        """Return the gauges of the steps handed out by lag."""
        return {labelled(CONSUMED_LAG, "le", le): steps for le, steps in up_to(self._consumed)}

    def time_share(self) -> dict[str, float]:
        """Return the gauges of the learner's time over the last seconds; empty before it has told some."""
        if len(self._times) < 2:
            return {}
        spent = [later - earlier for earlier, later in zip(self._times[0], self._times[-1], strict=True)]
        shares = zip(LEARNER_PARTS, spent, strict=True)
        return {labelled(LEARNER_TIME, "part", part): seconds / sum(spent) for part, seconds in shares}
