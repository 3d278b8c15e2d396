"""The figures that the page, `top` and the report show: tiles, columns of workers, charts. All are from the table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from string import Formatter
from typing import Any

from headrace.deploy.report.progress import duration
from headrace.deploy.report.run_rows import LAG_QUANTILES
from headrace.schemas.accounts.aborted_episodes import aborted_in_words
from headrace.schemas.accounts.figures import FLEET_TABLE, GAUGE_TABLE, RESTARTS, SLOT_TABLE, WORKER_TABLE, Metric
from headrace.schemas.accounts.lifetime_counters import COUNTER_TABLE
from headrace.schemas.accounts.redis_keys import labelled
from headrace.schemas.basics.printable import one_line

Chart = dict[str, Any]
"""One chart of `charts.js`: `title`, `unit`, `scale`, `isWhole`, `lines` (name, label), `bands` (low, high, label)."""

_FIGURES = (*GAUGE_TABLE, *COUNTER_TABLE, RESTARTS, *FLEET_TABLE)
TILES = tuple(figure for figure in _FIGURES if figure.shown)
WORKER_COLUMNS = tuple(figure for figure in (*SLOT_TABLE, *WORKER_TABLE) if figure.shown)
_UNITS = {figure.name: figure.unit for figure in _FIGURES} | {"lost_share": "1"}
_COUNTED = ("batches", "env steps/s", "episodes", "messages", "workers", "versions", "sessions", "agent steps")
RATES = {one.name: one.column_for() for one in _FIGURES if one.name.endswith("_total") and "/s" in one.chart}
"""Counters that charts draw as rates, and their columns in the rows of a run."""
_QUANTILES = {"0.5": "median", "0.95": "95 %"}
_BANDS = (("0.05", "0.95", "5 % to 95 %"), ("0.25", "0.75", "quartiles"))
_LONGEST = 400


def tiles_of(numbers: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the tiles of a fleet as texts. `numbers` has its figures without a label by name."""
    ends = (int(numbers.get(name) or 0) for name in ("episodes_window", "episodes_window_aborted"))
    tiles, numbers = [], {**numbers, "left_out": aborted_in_words(*ends) or None}
    for figure in TILES:
        heading, *templates = figure.shown.split("; ")
        title, _, own = heading.partition(": ")
        text, *notes = (_filled(part, numbers) for part in (own or f"{{{figure.name}}}", *templates))
        tiles.append({"key": figure.name, "title": title, "text": text or "-", "note": "; ".join(filter(None, notes))})
    return tiles


def _filled(template: str, numbers: Mapping[str, Any]) -> str:
    """Return the template with the figures as text; "" where one of them is unknown."""
    names = [name for _, name, _, _ in Formatter().parse(template) if name]
    if any(numbers.get(name) is None for name in names):
        return ""
    return template.format(**{name: as_text(numbers[name], _UNITS.get(name, "")) for name in names})


def columns_of(workers: Iterable[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return the columns of the table of workers: those that at least one worker has a value for."""
    told = {name for worker in workers for name, value in worker.items() if value is not None}
    return [{"key": one.name, "title": one.shown, "unit": one.unit} for one in WORKER_COLUMNS if one.name in told]


def as_text(value: Any, unit: str, number: Callable[[float], str] | None = None) -> str:
    """Return a figure in its unit, as one line of bounded length. `number` makes the text of a plain number."""
    if isinstance(value, Mapping):
        value = ", ".join(f"{name} {count}" for name, count in value.items() if count)
    if isinstance(value, bool) or not isinstance(value, int | float) or (number and not unit):
        return one_line(str("-" if value is None else value)[:_LONGEST])
    if unit == "1":
        return f"{100 * value:.{int(value < 0.1)}f} %"
    if unit == "bytes":
        power = min(4, max(0, (int(value).bit_length() - 1) // 10))
        return f"{value / 1024**power:.{int(power > 0)}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
    if unit == "s":
        return f"{value:.1f} s" if value < 10 else duration(value)
    if unit == "versions" and value < 0:
        return "older epoch"
    if unit in _COUNTED and abs(value) >= 1:
        value = round(value)
    if number is not None:
        return number(value)
    return f"{value:,.1f}".removesuffix(".0") if abs(value) >= 100 else f"{value:.4g}"


def charts(name_of: Callable[[Metric, str], str]) -> list[Chart]:
    """Return all charts. `name_of` returns the name of the curve of a figure, for one value of its label."""
    found: dict[str, Chart] = {}
    for figure in _FIGURES:
        if figure.chart:
            heading, _, curve = figure.chart.partition(": ")
            title, _, unit = heading.partition(", ")
            scale = 100 if unit == "%" else 1
            empty: Chart = {"title": title, "unit": unit, "scale": scale, "lines": [], "bands": []}
            chart = found.setdefault(heading, {**empty, "isWhole": figure.unit in _COUNTED})
            for text, label in _labels(figure, curve):
                name = name_of(figure, text)
                rate = f"{name.removesuffix('_total')}_per_s"  # of a counter
                chart["lines"].append({"name": rate if figure.name in RATES else name, "label": label})
            if "0.05" in figure.known_values():
                chart["bands"] += [(name_of(figure, low), name_of(figure, high), said) for low, high, said in _BANDS]
    return list(found.values())


def _labels(figure: Metric, curve: str) -> Iterator[tuple[str, str]]:
    """Yield (value of the label, name of the curve) of each curve that is a line."""
    if not figure.label:
        yield "", curve
    elif figure.label == "le":
        yield from ((str(quantile), f"{_QUANTILES[str(quantile)]}, {curve}") for quantile in LAG_QUANTILES)
    elif figure.label == "quantile":
        has_bands = "0.05" in figure.known_values()
        yield from ((value, said) for value, said in _QUANTILES.items() if value == "0.5" or not has_bands)
    else:
        yield from ((value, f"{curve} {value}".strip()) for value in figure.known_values())


def curve_of(figure: Metric, text: str = "") -> str:
    """Return the name of a curve of `series.py`."""
    if figure.label == "le":
        return labelled(figure.name.removesuffix("_agent_steps_bucket"), "quantile", text)
    return labelled(figure.name, figure.label, text) if figure.label else figure.name


PAGE_CHARTS = charts(curve_of)
REPORT_CHARTS = charts(Metric.column_for)
PAGE_CURVES = (
    "env_steps_total",
    "learner/",
    *(line["name"] for chart in PAGE_CHARTS for line in chart["lines"]),
    *(edge for chart in PAGE_CHARTS for band in chart["bands"] for edge in band[:2]),
)
"""Prefixes of the names of the curves that the page draws, or that it needs for its axis of env steps."""
