"""Curves over time as SVG in a page: printable, without a script, with a table of the numbers below each."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from headrace.deploy.monitoring.html_page import folded, table, text
from headrace.deploy.report.progress import duration

Points = Sequence[tuple[float, float]]
"""(x, y), x rising."""

WIDTH, HEIGHT = 440, 204
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 10, 8, 36
_FLAT = 1e-3
"""A curve that varies by less of its size is drawn as a constant one: its axis would show rounding errors."""
MOST_POINTS = 110
"""Points that are drawn of a curve. Of more, each is the mean of several neighbours."""
MOST_CURVES = 8
MOST_DRAWN_MARKS = 40
"""Marks that are drawn in a chart. Of more, those near one another are one line, which names the first."""
_TABLE_ROWS = 12
_TICKS = 4


@dataclass(frozen=True, slots=True)
class Curve:
    """One line. A band of (x, low, high) is drawn as an area in the colour of the line."""

    name: str
    points: Points
    band: Sequence[tuple[float, float, float]] = ()
    dots: bool = False
    """True for values that belong to single moments: they are drawn as dots."""


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves with one unit, over seconds, with marks where something changed."""

    title: str
    unit: str
    curves: Sequence[Curve]
    marks: Sequence[tuple[float, str]] = ()
    end_s: float = 0.0
    """The end of the time axis, which begins at 0. The charts of a page have the same."""
    from_zero: bool = False
    """True if 0 is on the axis, whatever the values are."""
    percent: bool = False
    steps: Points = ()
    """(s, env steps until then), which the horizontal axis tells too."""

    def steps_at(self, at: float) -> str:
        """Return the number of env steps until a moment; "" where it is not known."""
        number = bisect_right(self.steps, (at, math.inf)) - 1
        return short_number(self.steps[number][1]) if number >= 0 else ""

    def moment(self, at: float) -> str:
        """Return a time with the env steps until then."""
        steps = self.steps_at(at)
        return f"{duration(at)} ({steps} env steps)" if steps else duration(at)


def chart_html(chart: Chart) -> str:
    """Return the chart as a figure; "" without a point."""
    curves = [
        replace(curve, points=_means(curve.points), band=_means(curve.band))
        for curve in chart.curves[:MOST_CURVES]
        if curve.points
    ]
    if not curves:
        return ""
    end_s = max(chart.end_s, *(curve.points[-1][0] for curve in curves)) or 1.0
    x = _scale([0.0, end_s], _LEFT, WIDTH - _RIGHT)
    values = [p[1] for c in curves for p in c.points] + [v for c in curves for p in c.band for v in p[1:]]
    low, high, step = _axis(values, chart.from_zero)
    y = _scale([low, high], HEIGHT - _BOTTOM, _TOP)

    def show(value: float) -> str:
        return f"{100 * value:.3g} %" if chart.percent else short_number(value)

    parts = [
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{text(_in_words(chart, show))}">',
        *_axes(chart, end_s, x, y, (low, high, step), show),
        *(_band(number, curve, x, y) for number, curve in enumerate(curves) if curve.band),
        *(_mark(group, x(group[0][0])) for group in _near(chart.marks, end_s)),
        *(_line(number, curve, x, y) for number, curve in enumerate(curves)),
        *_hover(chart, curves, x, show),
        "</svg>",
    ]
    unit = f' <span class="dim">{text(chart.unit)}</span>' if chart.unit else ""
    named = [] if len(curves) == 1 and curves[0].name in chart.title else list(enumerate(curves))
    keys = "".join(
        f'<span class="key"><svg class="swatch" viewBox="0 0 12 7" aria-hidden="true"><rect class="areas c{number}" '
        f'width="12" height="7"/></svg> {text(curve.name)}</span>'
        for number, curve in named
    )
    head = f"<h3>{text(chart.title)}{unit}</h3><figcaption>{keys}</figcaption>"
    return f"<figure>{head}{''.join(parts)}{_table(chart, show)}</figure>"


def short_number(value: float) -> str:
    """Return a number in few characters: 1.2M, 41.2k, 475, 0.0123."""
    size = abs(value)
    for unit, one in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if size >= 0.9995 * one and size >= 1e4:
            return f"{value / one:.3g}{unit}"
    if size >= 1000:
        return f"{value:,.0f}"
    if 0 < size < 1e-3:
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    return f"{value:.3g}"


def _means(points: Sequence[tuple[float, ...]]) -> list[tuple]:  # type: ignore[type-arg]
    """Return at most `MOST_POINTS` points: the means of as many groups of neighbours in time."""
    if len(points) <= MOST_POINTS:
        return list(points)
    first, last = points[0][0], points[-1][0]
    one = (last - first) / MOST_POINTS or 1.0
    groups: dict[int, list[tuple[float, ...]]] = {}
    for point in points:
        groups.setdefault(min(int((point[0] - first) / one), MOST_POINTS - 1), []).append(point)
    return [tuple(sum(values) / len(group) for values in zip(*group, strict=True)) for group in groups.values()]


def _scale(values: Sequence[float], begin: float, end: float) -> Callable[[float], float]:
    """Return the function that maps the range of `values` to [begin, end]."""
    low, high = min(values), max(values)
    width = high - low

    def at(value: float) -> float:
        if width <= 0:
            return (begin + end) / 2
        return round(begin + (min(max(value, low), high) - low) / width * (end - begin), 1)

    return at


def _axis(values: Sequence[float], from_zero: bool) -> tuple[float, float, float]:
    """Return round numbers (low, high, step) around the values."""
    low, high = min(values), max(values)
    if from_zero or high - low <= _FLAT * max(abs(low), abs(high)):
        low, high = min(low, 0.0), max(high, 0.0)
    if low == high:
        high = low + 1.0
    rough = (high - low) / _TICKS
    size = 10.0 ** math.floor(math.log10(rough))
    step = next((size * factor for factor in (1, 2, 2.5, 5) if size * factor >= rough), size * 10)
    return math.floor(low / step) * step, math.ceil(high / step) * step, step


def _axes(
    chart: Chart,
    end_s: float,
    x: Callable[[float], float],
    y: Callable[[float], float],
    axis: tuple[float, float, float],
    show: Callable[[float], str],
) -> list[str]:
    low, high, step = axis
    parts = []
    for number in range(round((high - low) / step) + 1):
        value = low + number * step
        value = 0.0 if abs(value) < step / 1000 else value
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y(value)}" y2="{y(value)}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y(value) + 4}" text-anchor="end">{text(show(value))}</text>')
    for part, anchor in enumerate(("start", "middle", "middle", "end")):
        at = end_s * part / 3
        steps = chart.steps_at(at)
        for up, label in ((20, duration(at)), (6, f"{steps} env steps" if anchor == "end" else steps)):
            if steps or up > 6:
                parts.append(f'<text x="{x(at)}" y="{HEIGHT - up}" text-anchor="{anchor}">{text(label)}</text>')
    return parts


def _line(number: int, curve: Curve, x: Callable[[float], float], y: Callable[[float], float]) -> str:
    places = [(x(at), y(value)) for at, value in curve.points]
    if curve.dots or len(places) == 1:
        dots = "".join(f'<circle cx="{px}" cy="{py}" r="2.6"/>' for px, py in places)
        return f'<g class="areas c{number}">{dots}</g>'
    return f'<polyline class="lines c{number}" points="{" ".join(f"{px},{py}" for px, py in places)}"/>'


def _band(number: int, curve: Curve, x: Callable[[float], float], y: Callable[[float], float]) -> str:
    there = [f"{x(at)},{y(high)}" for at, _, high in curve.band]
    back = [f"{x(at)},{y(low)}" for at, low, _ in reversed(curve.band)]
    return f'<polygon class="areas c{number}" points="{" ".join(there + back)}"/>'


def _near(marks: Sequence[tuple[float, str]], end_s: float) -> list[list[tuple[float, str]]]:
    """Return the marks in groups of neighbours in time, `MOST_DRAWN_MARKS` at most."""
    groups: dict[int, list[tuple[float, str]]] = {}
    for mark in marks:
        groups.setdefault(min(int(mark[0] / end_s * MOST_DRAWN_MARKS), MOST_DRAWN_MARKS - 1), []).append(mark)
    return list(groups.values())


def _mark(group: Sequence[tuple[float, str]], px: float) -> str:
    at, what = group[0]
    more = f", and {len(group) - 1} more" if len(group) > 1 else ""
    name = text(f"{duration(at)}: {what}{more}")
    return f'<line class="mark" x1="{px}" x2="{px}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"><title>{name}</title></line>'


def _hover(
    chart: Chart, curves: Sequence[Curve], x: Callable[[float], float], show: Callable[[float], str]
) -> list[str]:
    """Return a strip for each moment of the first curve, whose title says all values there."""
    moments = [at for at, _ in curves[0].points]
    edges = [float(_LEFT), *((x(a) + x(b)) / 2 for a, b in pairwise(moments)), float(WIDTH - _RIGHT)]
    nearest = [dict(curve.points) for curve in curves]
    strips = []
    for at, begin, end in zip(moments, edges, edges[1:], strict=False):
        said = [f"{c.name} {show(known[at])}" for c, known in zip(curves, nearest, strict=True) if at in known]
        said = said if len(curves) > 1 else [show(nearest[0][at])]
        strips.append(
            f'<rect x="{begin:.1f}" width="{max(end - begin, 0.5):.1f}" y="{_TOP}" height="{HEIGHT - _TOP - _BOTTOM}">'
            f"<title>{text(chart.moment(at) + ': ' + ', '.join(said))}</title></rect>"
        )
    return ['<g class="hover">', *strips, "</g>"]


def _in_words(chart: Chart, show: Callable[[float], str]) -> str:
    said = []
    for curve in chart.curves[:MOST_CURVES]:
        if curve.points:
            values = [value for _, value in curve.points]
            said.append(f"{curve.name} from {show(min(values))} to {show(max(values))}, at the end {show(values[-1])}")
    return f"{chart.title}: {'; '.join(said)}"


def _table(chart: Chart, show: Callable[[float], str]) -> str:
    """Return some moments of all curves as a table."""
    curves = [curve for curve in chart.curves[:MOST_CURVES] if curve.points]
    moments = [at for at, _ in max((c.points for c in curves), key=len)]
    step = max(1, math.ceil(len(moments) / _TABLE_ROWS))
    chosen = sorted({*moments[::step], moments[-1]})
    known = [dict(curve.points) for curve in curves]
    rows = [(chart.moment(at), *(show(own[at]) if at in own else "" for own in known)) for at in chosen]
    return folded("as a table", table(chart.title, ("time", *(curve.name for curve in curves)), rows))
