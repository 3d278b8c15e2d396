"""Curves of a fleet over time: its history in Redis, what its learner logs, and marks where something changed.

All curves of a ring share their times, which are multiples of its interval. A value that a learner logged within an
interval stands at its end, under "learner/NAME". A counter `x_total` also has the curve `x_per_s`, of its growth.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from headrace.deploy.run.redis_view import EventView, FleetView, LearnerRowView
from headrace.schemas.accounts.lag_buckets import lag_quantiles
from headrace.schemas.accounts.redis_keys import ACCEPTED_LAG, CONSUMED_LAG, RINGS, labelled
from headrace.schemas.basics.printable import one_line
from headrace.schemas.errors import RedisUnavailableError

Values = Mapping[str, float]

_GAP = 2.5
"""Intervals without an entry after which a curve is interrupted."""
_READ_S = 5.0


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment at which something changed. `count` events of the same kind within one interval are one mark."""

    unix_s: float
    kind: str
    sentence: str
    count: int = 1


@dataclass(frozen=True, slots=True)
class Series:
    """Curves by name at common times, with None for unknown values, and marks."""

    interval_s: int
    unix_s: Sequence[float]
    curves: Mapping[str, Sequence[float | None]]
    marks: Sequence[Mark] = ()

    def document(self) -> dict[str, Any]:
        """Return the curves as plain values for JSON."""
        return {
            "interval_s": self.interval_s,
            "unix_s": list(self.unix_s),
            "curves": {name: [_short(value) for value in values] for name, values in self.curves.items()},
            "marks": [asdict(mark) for mark in self.marks],
        }


class SeriesReader:
    """Reads the curves of one ring. Each `read` fetches only what is new. One thread at a time, as the view."""

    def __init__(self, view: FleetView, interval_s: int = 5) -> None:
        self._view = view
        self._interval_s = interval_s
        self._most = next(most for _, seconds, most in RINGS if seconds == interval_s)
        self._history: dict[float, Values] = {}
        self._learner: dict[float, dict[str, float]] = {}
        self._newest_row = (0, 0)
        self._events: dict[str, EventView] = {}

    def read(self) -> None:
        """Read what is new. Waits some seconds at most. Raises `RedisUnavailableError`."""
        newest = max(self._history, default=0.0)
        for unix_s, values in self._view.history(self._interval_s, newest):
            self._history[unix_s] = values
        while rows := self._view.learner_rows(self._newest_row):
            self._newest_row = rows[-1].identity
            self._take_rows(rows)
        for event in self._view.events(max(self._events, key=event_order, default="0-0")):
            self._events[event.identity] = event
        self._forget_old()

    def series(self, after_unix_s: float = 0.0, names: Iterable[str] | None = None) -> Series:
        """Return the curves after a time. `names`: only curves with these prefixes. The marks are always complete."""
        wanted = None if names is None else tuple(names)
        entries = [(at, self._history.get(at, {}), self._learner.get(at, {})) for at in self._times()]
        unix_s: list[float] = []
        rows: list[dict[str, float]] = []
        before: tuple[float, Values] = (0.0, {})
        for at, history, learner in entries:
            is_gap = bool(unix_s) and at - unix_s[-1] > _GAP * self._interval_s
            if at > after_unix_s:
                if is_gap:
                    unix_s.append(unix_s[-1] + self._interval_s)
                    rows.append({})
                near = before[1] if 0 < at - before[0] <= _GAP * self._interval_s else {}
                row = {**history, **dict(_rates(near, history, at - before[0])), **_lags(near, history), **learner}
                unix_s.append(at)
                rows.append({name: value for name, value in row.items() if wanted is None or name.startswith(wanted)})
            if history:
                before = (at, history)
        found = sorted({name for row in rows for name in row})
        curves = {name: [row.get(name) for row in rows] for name in found}
        return Series(self._interval_s, unix_s, curves, marks(self._events.values(), self._interval_s))

    def _times(self) -> list[float]:
        return sorted(self._history.keys() | self._learner.keys())

    def _take_rows(self, rows: Sequence[LearnerRowView]) -> None:
        """Keep the last value of each metric within each interval, at the end of the interval."""
        for row in rows:
            at = (row.unix_s // self._interval_s + 1) * self._interval_s
            for name, value in row.values.items():
                self._learner.setdefault(at, {})[f"learner/{name}"] = value

    def _forget_old(self) -> None:
        """Drop entries that are older than the rings in Redis can hold."""
        oldest = max(self._times(), default=0.0) - self._most * self._interval_s
        for kept in (self._history, self._learner):
            for at in [at for at in kept if at <= oldest]:
                del kept[at]
        for identity in sorted(self._events, key=event_order)[:-1000]:
            del self._events[identity]


class CurvesReader:
    """Reads the curves of several rings every few seconds. Keeps the last ones while Redis does not answer."""

    def __init__(self, intervals: Sequence[int]) -> None:
        self.readers: dict[int, SeriesReader] = {}
        """By interval of the ring, s."""
        self._intervals = intervals
        self._view: FleetView | None = None
        self._read_at = -math.inf

    def read(self, view: FleetView | None, *, at_once: bool = False) -> None:
        """Read what is new in `view` if a read is due, or `at_once`. Another view is of another fleet or Redis."""
        if view is not self._view:
            self._view, self._read_at = view, -math.inf
            self.readers = {s: SeriesReader(view, s) for s in self._intervals} if view is not None else {}
        if at_once or time.monotonic() - self._read_at >= _READ_S:
            self._read_at = time.monotonic()
            with suppress(RedisUnavailableError):
                for reader in self.readers.values():
                    reader.read()


def event_order(identity: str) -> tuple[int, int]:
    """Return the sort key of an event's id."""
    unix_ms, _, number = identity.partition("-")
    return int(unix_ms), int(number or 0)


def marks(events: Iterable[EventView], interval_s: float) -> list[Mark]:
    """Return a mark for the events of each kind within each interval, the oldest first."""
    groups: dict[tuple[float, str], list[EventView]] = {}
    for event in events:
        is_again = event.kind == "joined" and event.fields.get("incarnation", "1") != "1"
        kind = "again" if is_again else event.kind
        groups.setdefault((event.unix_s // interval_s, kind), []).append(event)
    found = [Mark(group[0].unix_s, kind, _in_words(kind, group), len(group)) for (_, kind), group in groups.items()]
    return sorted(found, key=lambda mark: mark.unix_s)


_VERBS = {
    "joined": "joined",
    "again": "joined again",
    "lost": "lost the connection",
    "fenced": "fenced",
}


def _in_words(kind: str, group: Sequence[EventView]) -> str:
    if kind == "learner":
        return f"learner epoch {group[-1].fields.get('epoch', '?')[:20]} began"
    if kind == "broker":
        return "the broker started"
    slots = sorted({event.fields.get("slot", "?")[:10] for event in group})
    whom = f"worker {slots[0]}" if len(slots) == 1 else f"{len(slots)} workers"
    return f"{whom}: {_VERBS.get(kind, f'ended ({one_line(kind)[:40]})')}"


def _rates(before: Values, now: Values, seconds: float) -> Iterator[tuple[str, float]]:
    """Yield the growth per second of each counter. Skip a counter that fell: Redis had lost it."""
    for name, value in now.items() if before else ():
        bare, brace, labels = name.partition("{")
        grown = value - before.get(name, 0.0)
        if bare.endswith("_total") and grown >= 0:
            yield f"{bare.removesuffix('_total')}_per_s{brace}{labels}", grown / seconds


def _lags(before: Values, now: Values) -> dict[str, float]:
    """Return quantiles of the lag of steps between two moments, as `accepted_lag` and `consumed_lag` by quantile."""
    found = {}
    for curve, metric in (("accepted_lag", ACCEPTED_LAG), ("consumed_lag", CONSUMED_LAG)) if before else ():
        for quantile, lag in lag_quantiles(metric, before, now, (0.5, 0.95)).items():
            found[labelled(curve, "quantile", str(quantile))] = lag
    return found


def _short(value: float | None) -> float | None:
    """Return a value with as many digits as a chart can show; counters stay whole."""
    return value if value is None or value.is_integer() else float(f"{value:.6g}")
