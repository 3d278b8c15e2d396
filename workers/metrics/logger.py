"""Named numbers and how they are reduced: a runner's own counts, and what callbacks log."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.schemas.accounts.logged_metrics import LoggedMetric
from headrace.schemas.basics.printable import brief

Path = tuple[str, ...]
"""("num_episodes",), or ("num_agent_steps_sampled", "agent_0"), which is in a dict of its own in the report."""

_NO_DEFAULT: Any = object()
_ELSEWHERE = {
    "set_value": "log_value(name, value, reduce='item')",
    "log_throughput": "log_value(name, count, reduce='sum'), and divide by the time between two reports",
    "reduce": "runner.get_metrics()",
    "compile": "runner.get_metrics()",
    "reset": "a new runner; figures over a window forget by themselves",
    "delete": "another name",
    "aggregate": "headrace.workers.merge_metrics(reports)",
    "merge_and_log_n_dicts": "headrace.workers.merge_metrics(reports)",
    "log_n_dicts": "log_dict(values) for each",
    "get_state": "runner.get_state(), which has all lifetime counters",
    "set_state": "runner.set_state(state)",
}
"""Names that RLlib's logger has and this one lacks -> the replacement."""
_OLDER = {
    "env_runners": "the figures themselves, which have no dict around them",
    "sampler_results": "the figures themselves, which have no dict around them",
    "custom_metrics": "the name under which the callback logged it",
    "episode_reward_mean": "episode_return_mean",
    "episode_reward_min": "episode_return_min",
    "episode_reward_max": "episode_return_max",
    "policy_reward_mean": "module_episode_returns_mean",
    "episodes_this_iter": "num_episodes",
    "episodes_total": "num_episodes_lifetime",
    "episodes_timesteps_total": "num_env_steps_sampled_lifetime",
    "timesteps_total": "num_env_steps_sampled_lifetime",
    "num_env_steps_sampled_this_iter": "num_env_steps_sampled",
}
"""Names of RLlib's older reports -> the replacement. Newer names are the same here."""


@dataclass(frozen=True, slots=True)
class FigureWindow:
    """The newest values behind one figure. Several figures may share them."""

    path: Path
    reduce: str
    values: Sequence[float]

    def figure(self) -> float:
        """Return the reduced value of at least one value. Raises `ValueError` for an unknown reduction."""
        return _reduction(self.reduce)(self.values)


class MetricsLogger:
    """Collects numbers by name.

    `reduce` is one of:

    - mean, min, max, item (the newest), p0 to p100 (percentiles): over the newest `window` values, kept between reports
    - sum: since the last report
    - lifetime_sum: since the runner was built

    `log_value`, `log_dict`, `log_time` and `peek` are as in RLlib. For other names of RLlib's logger, and arguments
    without a meaning here, the error names the replacement.
    """

    def __init__(self, window: int, reserved: Iterable[str] = ()) -> None:
        self._window = window
        self._reserved = frozenset(reserved)
        self._windows: dict[Path, tuple[str, deque[float]]] = {}
        self._sums: dict[Path, tuple[str, float]] = {}
        self._totals: dict[Path, tuple[float, int]] = {}
        """Total and number of values of each sum, since this logger was made."""

    def log_value(
        self,
        name: str | Path,
        value: float,
        *,
        reduce: str = "mean",
        window: int | None = None,
        clear_on_reduce: bool | None = None,
        ema_coeff: float | None = None,
    ) -> None:
        """Log one number.

        `clear_on_reduce` is RLlib's: of a "sum", True counts from the last report and False makes it a "lifetime_sum".

        Raises `ValueError` if it is no finite number, if the name is reserved or already has another meaning, for
        `clear_on_reduce` of a window, and for `ema_coeff`: exponential means of several runners cannot be merged.
        """
        path = _path(name)
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ValueError(
                f"metric {'/'.join(path)} was given {brief(value, 60)}, which is no single number"
            ) from error
        if clear_on_reduce is not None or ema_coeff is not None:
            reduce = _own_reduction("/".join(path), reduce, clear_on_reduce, ema_coeff)
        if not math.isfinite(number):
            raise ValueError(f"metric {'/'.join(path)} was given {number}; log finite numbers only")
        if path[0] in self._reserved:
            raise ValueError(f"metric {path[0]} is the runner's own; choose another name")
        known = self._windows.get(path) or self._sums.get(path)
        if known is None:
            known = self._start(path, reduce, self._window if window is None else window)
        if known[0] != reduce:
            raise ValueError(f"metric {'/'.join(path)} is reduced by {known[0]!r}, not {reduce!r}; keep to one")
        if path in self._windows:
            self._windows[path][1].append(number)
        else:
            self._sums[path] = reduce, self._sums[path][1] + number
            total, count = self._totals.get(path, (0.0, 0))
            self._totals[path] = total + number, count + 1

    def log_dict(self, values: Mapping[str, Any], *, key: str | Path | None = None, **how: Any) -> None:
        """Log each number of a dict of numbers and such dicts, below `key` if it is given; `how`: as in `log_value`."""
        above = () if key is None else _path(key)
        for name, value in values.items():
            if isinstance(value, Mapping):
                self.log_dict(value, key=(*above, name), **how)
            else:
                self.log_value((*above, name), value, **how)

    def peek(self, name: str | Path, default: Any = _NO_DEFAULT) -> Any:
        """Return the current figure of `name`. Without values return `default`, or raise `KeyError`."""
        path = _path(name)
        if path in self._sums:
            return self._sums[path][1]
        reduce, values = self._windows.get(path, ("", ()))
        if values:
            return _reduction(reduce)(values)
        if default is _NO_DEFAULT:
            raise KeyError(f"nothing was logged as {'/'.join(path)}; give peek a default")
        return default

    def __getattr__(self, name: str) -> Any:
        hint = f"; take {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{hint}", name=name, obj=self)

    @contextmanager
    def log_time(self, name: str | Path, *, reduce: str = "mean", window: int | None = None) -> Iterator[None]:
        """Log how many seconds the block took; nothing if it raises."""
        begun = time.perf_counter()
        yield
        self.log_value(name, time.perf_counter() - begun, reduce=reduce, window=window)

    def _start(self, path: Path, reduce: str, window: int) -> tuple[str, Any]:
        for other in (*self._windows, *self._sums):
            if path[: len(other)] == other[: len(path)]:
                raise ValueError(f"metric {'/'.join(path)} and {'/'.join(other)} would be one name for two things")
        if reduce in ("sum", "lifetime_sum"):
            return self._sums.setdefault(path, (reduce, 0.0))
        _reduction(reduce)
        return self._windows.setdefault(path, (reduce, deque(maxlen=1 if reduce == "item" else window)))

    def windows(self) -> list[FigureWindow]:
        """Return the windows of all figures that are reduced from single values."""
        return [FigureWindow(path, reduce, values) for path, (reduce, values) in self._windows.items()]

    def take_sums(self) -> dict[Path, float]:
        """Return all sums, and reset those that count since the last report."""
        sums = {path: total for path, (_, total) in self._sums.items()}
        self._sums = {p: (kind, total if kind == "lifetime_sum" else 0.0) for p, (kind, total) in self._sums.items()}
        return sums

    def cumulative(self) -> dict[str, LoggedMetric]:
        """Return all logged figures by joined name, in a form that merges over workers. Changes nothing.

        Sums of both kinds count since this logger was made. For items and percentiles the fleet shows the mean of all
        workers.
        """
        windows = {
            "/".join(window.path): LoggedMetric(
                reduce=window.reduce if window.reduce in ("min", "max") else "mean",
                value=window.figure(),
                count=len(window.values),
            )
            for window in self.windows()
            if window.values
        }
        totals = {
            "/".join(path): LoggedMetric(reduce="sum", value=total, count=count)
            for path, (total, count) in self._totals.items()
            if math.isfinite(total)
        }
        return windows | totals


def _path(name: str | Path) -> Path:
    return (name,) if isinstance(name, str) else tuple(map(str, name))


def _own_reduction(name: str, reduce: str, clear_on_reduce: bool | None, ema_coeff: float | None) -> str:
    """Return our name of a reduction that RLlib's arguments describe. Raises `ValueError` where there is none."""
    if ema_coeff is not None:
        raise ValueError(f"metric {name} was given ema_coeff = {ema_coeff}; take window=n, a mean of the newest n")
    if clear_on_reduce is None:
        return reduce
    if reduce in ("sum", "lifetime_sum"):
        return "sum" if clear_on_reduce else "lifetime_sum"
    if clear_on_reduce:
        raise ValueError(
            f"metric {name} was given clear_on_reduce = True with reduce = {reduce!r}, which keeps its newest values "
            "between reports; leave it out, or take reduce='sum'"
        )
    return reduce


class MetricsReport(dict[str, Any]):
    """Figures by name. For a name of older RLlib versions the KeyError says ours."""

    def __missing__(self, name: str) -> Any:
        hint = f"take {_OLDER[name]}" if name in _OLDER else "a figure without values is absent"
        raise KeyError(f"no figure {name!r}; {hint}")


def build_report(sums: Mapping[Path, float], windows: Iterable[FigureWindow]) -> MetricsReport:
    """Return figures by name, and under "windows" the values that `merge_metrics` needs.

    A figure without values is absent, and so is a dict without figures. No figure is ever NaN.
    """
    report = MetricsReport()
    kept = []
    for path, total in sums.items():
        _place(report, path, total)
    for window in windows:
        if window.values:
            _place(report, window.path, window.figure())
            kept.append({"path": list(window.path), "reduce": window.reduce, "values": list(window.values)})
    report["windows"] = kept
    return report


def merge_metrics(reports: Iterable[Mapping[str, Any]]) -> MetricsReport:
    """Return one report of several runners', with the same keys.

    Counts and rates are summed; windows are reduced from all values. The result is exact: one runner that had sampled
    all of it would report the same, within each runner's window.
    """
    sums: dict[Path, float] = {}
    values: dict[tuple[Path, str], list[float]] = {}
    for report in reports:
        windows = {tuple(window["path"]): window for window in report["windows"]}
        for path, window in windows.items():
            values.setdefault((path, window["reduce"]), []).extend(window["values"])
        for path, number in _figures(report):
            if path not in windows:
                sums[path] = sums.get(path, 0) + number
    return build_report(sums, [FigureWindow(path, reduce, numbers) for (path, reduce), numbers in values.items()])


def _figures(report: Mapping[str, Any], prefix: Path = ()) -> Iterator[tuple[Path, float]]:
    for name, value in report.items():
        if isinstance(value, Mapping):
            yield from _figures(value, (*prefix, name))
        elif prefix or name != "windows":
            yield (*prefix, name), value


def _place(report: dict[str, Any], path: Path, value: float) -> None:
    for name in path[:-1]:
        report = report.setdefault(name, {})
    report[path[-1]] = value


def _reduction(reduce: str) -> Callable[[Sequence[float]], float]:
    if reduce in _REDUCTIONS:
        return _REDUCTIONS[reduce]
    if reduce[:1] == "p" and reduce[1:].isdigit() and int(reduce[1:]) <= 100:
        percent = int(reduce[1:])
        return lambda values: float(np.percentile(np.fromiter(values, np.float64), percent))
    raise ValueError(f"reduce = {reduce!r} is none of mean, min, max, item, p0 to p100, sum, lifetime_sum")


_REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": lambda values: math.fsum(values) / len(values),
    "min": min,
    "max": max,
    "item": lambda values: values[-1],
}
