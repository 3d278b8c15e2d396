"""The curves of a run: each column of its rows over time, with marks where something changed."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean

from headrace.deploy.annexes.watch.state.shown_figures import RATES
from headrace.deploy.loggers import Row

MOST_COLUMNS = 1000
MOST_MARKS = 1000
MOST_DRAWN = 250
"""Moments that are drawn."""
_NO_CURVES = ("kind", "time", "elapsed_s", "learner_row")
_OTHER_START_S = 5.0
"""Rows whose starts are so far apart are of different runs in the directory."""


@dataclass(slots=True)
class Column:
    """The values of one column. The arrays are equally long."""

    elapsed_s: array[float] = field(default_factory=lambda: array("d"))
    env_steps: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def points(self) -> list[tuple[float, float]]:
        """Return (s, value) pairs."""
        return list(zip(self.elapsed_s, self.values, strict=True))


class RunSeries:
    """All columns of the rows of a run by name, over the seconds that the fleet ran, and the rates of some counters.

    Time in which no fleet ran in the directory does not count. Memory is 24 bytes a value.
    """

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self.columns: dict[str, Column] = {}
        self.marks: list[tuple[float, str]] = []
        """(s, what changed): restarts, learner epochs and starts of the fleet."""
        self.starts = [0.0]
        """At how many s a fleet started in the directory."""
        self.end_s = 0.0
        self.last: dict[str, float | int | str] = {}
        """The last row of the fleet."""
        self._start = -math.inf
        self._longest_s = 0.0
        for row in rows:
            self._add(row)
        for name in self.columns.keys() & RATES.values():
            self.columns[f"{name}_per_s"] = self._rate(self.columns[name])

    def names(self, prefix: str) -> list[str]:
        """Return the columns whose names begin with `prefix`, in order of first appearance."""
        return [name for name in self.columns if name.startswith(prefix)]

    def drawn(self, names: Iterable[str]) -> tuple[list[float], dict[str, list[float | None]]]:
        """Return at most `MOST_DRAWN` moments in s, and the values of columns then; None where a column has none.

        If there are more rows, each value is the mean of neighbours in time. A moment without values separates starts.
        """
        columns = {name: self.columns[name] for name in names}
        times = sorted({at for column in columns.values() for at in column.elapsed_s})
        step = (times[-1] - times[0]) / MOST_DRAWN if len(times) > MOST_DRAWN else 0.0
        numbers = (min(int((at - times[0]) / step), MOST_DRAWN - 1) if step else n for n, at in enumerate(times))
        place = {at: (self._run_at(at), number) for at, number in zip(times, numbers, strict=True)}

        def means(points: Iterable[tuple[float, float]]) -> dict[tuple[int, int], float]:
            groups: dict[tuple[int, int], list[float]] = {}
            for at, value in points:
                groups.setdefault(place[at], []).append(value)
            return {where: float(f"{fmean(values):.6g}") for where, values in groups.items()}

        gaps = {(run, MOST_DRAWN): float(f"{at:.6g}") for run, at in enumerate(self.starts[1:], 1)}
        moments = dict(sorted((means(zip(times, times, strict=True)) | gaps).items()))
        known = {name: means(column.points()) for name, column in columns.items()}
        return list(moments.values()), {name: [one.get(at) for at in moments] for name, one in known.items()}

    def _add(self, row: Row) -> None:
        unix_s, elapsed_s, env_steps = (_number(row.get(name)) for name in ("time", "elapsed_s", "env_steps"))
        if unix_s is None or elapsed_s is None:
            return
        self._follow_starts(unix_s - elapsed_s, elapsed_s)
        self._longest_s = max(self._longest_s, elapsed_s)
        at = max(0.0, self.starts[-1] + elapsed_s)
        self.end_s = max(self.end_s, at)
        if row.get("kind") == "fleet":
            self._mark_changes(row, at)
            self.last = dict(row)
            row = {**dict.fromkeys(self.names("workers_blocked"), 0), **row}  # a row without one: no worker waits
        for name, told in row.items():
            value = _number(told)
            if value is None or name in _NO_CURVES:
                continue
            column = self.columns.get(name)
            if column is None:
                if len(self.columns) >= MOST_COLUMNS:
                    continue
                column = self.columns[name] = Column()
            if not column.elapsed_s or at >= column.elapsed_s[-1]:
                column.elapsed_s.append(at)
                column.env_steps.append(env_steps or 0.0)
                column.values.append(value)

    def _run_at(self, elapsed_s: float) -> int:
        """Return in which start of the fleet a time was, from 1 on."""
        return bisect_left(self.starts, elapsed_s, 1)

    def _rate(self, counter: Column) -> Column:
        """Return the growth of a counter per second; none from one start to the next, or where it fell."""
        rows = zip(counter.elapsed_s, counter.env_steps, counter.values, strict=True)
        grown = [
            (at, env_steps, (now - count) / (at - before))
            for (before, _, count), (at, env_steps, now) in pairwise(rows)
            if at > before and now >= count and self._run_at(at) == self._run_at(before)
        ]
        return Column(*(array("d", values) for values in zip(*grown, strict=True)))

    def _follow_starts(self, start: float, elapsed_s: float) -> None:
        """Notice that another fleet has started. A clock that was set does not count as one."""
        if abs(start - self._start) <= _OTHER_START_S:
            return
        is_first, self._start = math.isinf(self._start), start
        if is_first or elapsed_s >= self._longest_s:
            return
        self.starts.append(self.end_s)
        self._longest_s = 0.0
        self._mark(self.end_s, "the run goes on")
        self.last = {name: told for name, told in self.last.items() if not name.startswith("restarts")}

    def _mark_changes(self, row: Row, at: float) -> None:
        epoch, before = row.get("learner_epoch"), self.last.get("learner_epoch")
        if epoch != before and before:
            self._mark(at, f"learner epoch {epoch}")
        for name, told in row.items():
            role = name.removeprefix("restarts/")
            if role == name:
                continue
            more = (_number(told) or 0) - (_number(self.last.get(name)) or 0)
            if more > 0:
                self._mark(at, f"{role} restarted" + (f" {more:.0f} times" if more > 1 else ""))

    def _mark(self, at: float, what: str) -> None:
        if len(self.marks) < MOST_MARKS:
            self.marks.append((at, what))


def _number(told: object) -> float | None:
    if isinstance(told, bool) or not isinstance(told, int | float):
        return None
    return told if math.isfinite(told) else None
