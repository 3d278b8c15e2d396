"""The result of every bench: rows with an arm's rate and its ratio to the limit of the same round, with the spread."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.turns import Turn


@dataclass(frozen=True, slots=True)
class Row:
    """Median rate of one arm in one case, and the median of its ratios to the limit, round by round."""

    bench: str
    case: str
    arm: str
    unit: str
    rate: float
    ratio: float
    ratio_low: float
    ratio_high: float
    cpu_ratio: float | None = None
    """The same ratio per second of processor time. It is steadier on a busy machine."""
    mark: float | None = None
    """The target: the least ratio."""
    most: float | None = None
    """The target where less is better: the largest ratio."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def rows_of(
    bench: str, case: str, unit: str, turns: Sequence[Mapping[str, Turn]], limit: str, marks: Mapping[str, float]
) -> list[Row]:
    """Return one row for each arm of one case."""
    rows = []
    for arm in turns[0]:
        rate = statistics.median(turn[arm].rate for turn in turns)
        ratios = [turn[arm].rate / turn[limit].rate for turn in turns]
        ratio, low, high = statistics.median(ratios), min(ratios), max(ratios)
        cpu_ratio = statistics.median(turn[arm].per_cpu_s / turn[limit].per_cpu_s for turn in turns)
        rows.append(Row(bench, case, arm, unit, rate, ratio, low, high, cpu_ratio, marks.get(arm)))
    return rows


def show(rows: Sequence[Row]) -> None:
    """Print rows as a table."""
    names = f"{'bench':<10} {'case':<40} {'arm':<11}"
    print(f"{names} {'rate':>12} {'unit':<12} {'ratio':>6}  {'low..high':<12} {'a cpu-s':>7}  mark")
    for row in rows:
        digits = 2 if row.most is None else 3
        spread = f"{row.ratio_low:.{digits}f}..{row.ratio_high:.{digits}f}"
        cpu = "" if row.cpu_ratio is None else f"{row.cpu_ratio:.2f}"
        marks = {">=": row.mark, "<=": row.most}
        mark = " ".join(f"{sign} {value:.2f}" for sign, value in marks.items() if value is not None)
        print(
            f"{row.bench:<10} {row.case:<40} {row.arm:<11} {row.rate:>12,.0f} {row.unit:<12} {row.ratio:>6.{digits}f}"
            f"  {spread:<12} {cpu:>7}  {mark}"
        )
