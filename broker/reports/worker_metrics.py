"""Merges the metrics that callbacks log on all workers into one value for each name.

Each worker reports its metrics in every heartbeat. Sums include the lives that are over. Other reductions use only the
newest life of each slot, even when it has ended.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterable, Mapping, Sequence

from headrace.schemas.accounts.logged_metrics import LoggedMetric, LoggedMetrics, SumsOfLife
from headrace.schemas.accounts.redis_keys import PAST
from headrace.schemas.basics.bounds import MOST_COUNT

log = logging.getLogger(__name__)

MOST_NAMES = 256
"""Number of metric names that a fleet may log. Further names are left out."""


class WorkerMetrics:
    """The metrics of the newest life of each slot, and the sums of earlier ones."""

    def __init__(self) -> None:
        self._lives: dict[int, tuple[int, LoggedMetrics]] = {}
        """Slot -> (incarnation, metrics) of its newest life."""
        self._past: dict[str, float] = {}
        self._names: set[str] = set()
        self._left_out = False

    def take(self, slot: int, incarnation: int, metrics: LoggedMetrics) -> None:
        """Take the metrics that a life has logged so far. A life older than the newest of its slot is ignored."""
        newest, known = self._lives.get(slot, (0, {}))
        if incarnation < newest:
            return
        if incarnation > newest:
            self._add_to_past(_sums(known))
        self._lives[slot] = (incarnation, self._within_bounds(metrics))

    def merged(self) -> dict[str, LoggedMetric]:
        """Return one value for each metric. A reduction that only some workers use for a name is left out."""
        logged: dict[str, list[LoggedMetric]] = {}
        for _, metrics in self._lives.values():
            for name, metric in metrics.items():
                logged.setdefault(name, []).append(metric)
        for name, total in self._past.items():
            logged.setdefault(name, []).append(LoggedMetric(reduce="sum", value=total, count=0))
        merged = ((name, _merge(metrics)) for name, metrics in logged.items())
        return {name: metric for name, metric in merged if metric is not None}

    def sums(self) -> dict[str, SumsOfLife]:
        """Return the sums that a later broker goes on from: by slot, and those of earlier lives under `PAST`."""
        by_slot = {str(s): SumsOfLife(incarnation=i, sums=_sums(metrics)) for s, (i, metrics) in self._lives.items()}
        known = {slot: life for slot, life in by_slot.items() if life.sums}
        return known | ({PAST: SumsOfLife(sums=self._past)} if self._past else {})

    def go_on_from(self, saved: Mapping[str, SumsOfLife]) -> None:
        """Take over the sums that an earlier broker of this fleet saved. Newer knowledge of a life stays."""
        for field, life in saved.items():
            slot = -1 if field == PAST else int(field)
            newest = self._lives.get(slot, (0, {}))[0]
            if slot == -1 or life.incarnation < newest:
                self._add_to_past(life.sums)
            elif life.incarnation > newest:
                sums = {name: LoggedMetric(reduce="sum", value=total) for name, total in life.sums.items()}
                self.take(slot, life.incarnation, sums)

    def _add_to_past(self, sums: Mapping[str, float]) -> None:
        for name, total in sums.items():
            self._past[name] = _finite(self._past.get(name, 0.0) + total)

    def _within_bounds(self, metrics: LoggedMetrics) -> LoggedMetrics:
        kept = {}
        for name, metric in metrics.items():
            if name in self._names or len(self._names) < MOST_NAMES:
                self._names.add(name)
                kept[name] = metric
            elif not self._left_out:
                self._left_out = True
                log.warning("callbacks log more than %d metrics in this fleet; %r is left out", MOST_NAMES, name)
        return kept


def _sums(metrics: LoggedMetrics) -> dict[str, float]:
    return {name: metric.value for name, metric in metrics.items() if metric.reduce == "sum"}


def _merge(metrics: Sequence[LoggedMetric]) -> LoggedMetric | None:
    reduce = metrics[0].reduce
    same = [metric for metric in metrics if metric.reduce == reduce]
    count = min(sum(metric.count for metric in same), MOST_COUNT)
    if reduce == "sum":
        return LoggedMetric(reduce=reduce, value=_sum(metric.value for metric in same), count=count)
    if reduce == "mean":
        if not count:
            return None
        return LoggedMetric(reduce=reduce, value=_sum(m.value * (m.count / count) for m in same), count=count)
    edge = min if reduce == "min" else max
    return LoggedMetric(reduce=reduce, value=edge(metric.value for metric in same), count=count)


def _sum(values: Iterable[float]) -> float:
    return _finite(sum(values))


def _finite(value: float) -> float:
    """Return a finite sum: one beyond the range of floats becomes the largest float of its sign."""
    if math.isfinite(value):
        return value
    return math.copysign(sys.float_info.max, value) if not math.isnan(value) else 0.0
