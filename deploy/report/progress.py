"""Display of a run's progress: a live table on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO

from rich.console import RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from headrace.deploy.run.evaluation_log import describe
from headrace.deploy.run.goal import EPISODES_NEEDED, Goal, RunNumbers
from headrace.deploy.run.redis_view import Snapshot
from headrace.deploy.terminal.console import PrintableConsole
from headrace.deploy.terminal.logs import chosen_output
from headrace.deploy.terminal.std_streams import ignore_closed_reader, say
from headrace.schemas.accounts.figures import added_up
from headrace.schemas.accounts.redis_keys import revoked_sessions
from headrace.schemas.basics.bounds import MOST_COUNT
from headrace.schemas.basics.printable import one_line
from headrace.schemas.messages.message_base import MOST_SHORT_DETAIL

LIVE_INTERVAL_S = 0.5
LINE_INTERVAL_S = 5.0
STALE_S = 2.0
_BAR_WIDTH = 30
_WHOLE = ("learner_epoch", "weights_seq", "weights_lag", "held_batches")


@dataclass(frozen=True)
class ProgressView:
    """The values to show at one moment."""

    seconds: float
    numbers: RunNumbers
    goal: Goal
    start: RunNumbers = field(default_factory=RunNumbers)
    """The steps of earlier runs in the same directory, and the first mean return of this one over enough episodes."""
    snapshot: Snapshot = field(default_factory=Snapshot)
    restarts: Mapping[str, int] = field(default_factory=dict)
    redis_age_s: float = 0.0
    waiting: str = ""
    """Text that names what the fleet waits for while it takes no step; "" for nothing."""
    bottleneck: str = ""
    """Text that names what limits the pace, with the shares that say so; "" where nothing clearly does."""
    evaluation: Mapping[str, Any] | None = None
    """The newest line of evaluations.jsonl, parsed; None before the first."""

    def rows(self) -> list[tuple[str, str]]:
        """Return (label, value) pairs, in the order in which they are shown."""
        n, seen = self.numbers, self.snapshot
        figures = {**seen.gauges, **added_up(seen.workers.values())}
        epoch, seq, lag, held = (int(figures.get(name, 0)) for name in _WHOLE)
        mean = n.show_mean_return()
        if self.goal.until_return is not None:
            mean += f" of {self.goal.until_return:g}"
        rows = [
            ("time", f"{self.seconds:.0f} s"),
            *([("goal", self._way())] if self.goal != Goal() else []),
            ("env steps", f"{self._steps()} ({self._steps_per_s:,.0f}/s)"),
            ("episodes", f"{n.episodes:,}"),
            ("mean return", mean),
            ("weights", f"{epoch}/{seq} (lag {lag})"),
            ("queue", f"{held} batches"),
            ("restarts", name_restarts(self.restarts)),
        ]
        dropped = {reason: steps for reason, (steps, _) in seen.fleet.dropped.items()}
        lost = {"dropped": dropped, "discarded": seen.fleet.discarded}
        rows += [(what, self._lost(by_reason)) for what, by_reason in lost.items() if any(by_reason.values())]
        if self.evaluation is not None:
            rows.append(("evaluation", describe(self.evaluation)))
        if failures := env_failures(seen):
            rows.append(("env failures", failures))
        if revoked := revoked_sessions(seen.gauges):
            rows.append(("revoked keys", name_revoked(revoked)))
        if seen.joins_blocked:
            rows.append(("broker", f"no peer can join: {one_line(seen.joins_blocked)}"))
        if self.redis_age_s > STALE_S:
            how = (
                "silent for {:.0f} s, numbers are old"
                if self._is_old
                else "away for {:.0f} s, numbers are the broker's"
            )
            rows.append(("Redis", how.format(self.redis_age_s)))
        if self.waiting:
            rows.append(("waiting for", self.waiting))
        if self.bottleneck:
            rows.append(("pace", self.bottleneck))
        return rows

    def in_one_line(self) -> str:
        """Return all labels and values as one line."""
        return "  ".join(f"{what} {value}" for what, value in self.rows())

    @property
    def share_done(self) -> float:
        """Return the share of the way to the goal."""
        return self.goal.share_done(self.numbers, self.start, self.seconds)

    @property
    def _steps_per_s(self) -> float:
        return self.snapshot.gauges.get("env_steps_per_s", 0.0)

    @property
    def _is_old(self) -> bool:
        return self.redis_age_s > STALE_S and self.snapshot.away is None

    def _way(self) -> str:
        said = f"{int(100 * self.share_done)} %"
        if self.goal.until_steps is None and self.goal.until_return is not None and self.numbers.best_return is None:
            window = f"{self.numbers.window} of {EPISODES_NEEDED} episodes"
            said += f" ({'too many aborted' if self.numbers.doubt else window})"
        left = self._left()
        return f"{said}, {left}" if left else said

    def _left(self) -> str:
        """Return how long the run takes still, in words; "" where that is not known, as with a goal of a return."""
        goal = self.goal
        left_s = math.inf if goal.timeout_s is None else max(0.0, goal.timeout_s - self.seconds)
        if goal.until_steps is not None and self._steps_per_s > 0 and not self._is_old:
            missing = max(0, goal.until_steps - (self.numbers.steps - self.start.steps))
            steps_s = missing / self._steps_per_s
            if not missing:
                return ""
            if steps_s <= left_s:
                return f"about {duration(steps_s)} left{' at most' if goal.until_return is not None else ''}"
        if math.isinf(left_s):
            return ""
        alone = goal.until_return is goal.until_steps is None
        return f"{duration(left_s)} left" if alone else f"the time ends in {duration(left_s)}"

    def _lost(self, by_reason: Mapping[str, int]) -> str:
        total, taken = sum(by_reason.values()), self.snapshot.fleet.stepped
        share = f"{100 * total / taken:.2g} % of all: " if taken >= total else ""
        reasons = ", ".join(f"{one_line(why)} {steps:,}" for why, steps in by_reason.items() if steps)
        return f"{total:,} steps ({share}{reasons})"

    def _steps(self) -> str:
        steps, until = self.numbers.steps, self.goal.until_steps
        if until is None:
            return f"{steps:,}"
        before = self.start.steps
        in_all = f", {steps:,} in all" if before else ""
        return f"{max(0, steps - before):,} of {until:,}{in_all}"


def name_restarts(restarts: Mapping[str, int]) -> str:
    """Return how many restarts each role had, in words."""
    return ", ".join(f"{count} ({role})" for role, count in restarts.items() if count) or "none"


def name_revoked(revoked: Mapping[str, int]) -> str:
    """Return how many sessions the revocation of keys has ended, in words."""
    keys = ", ".join(one_line(name) for name in sorted(revoked))
    count = sum(revoked.values())
    return f"{count:,} {'session' if count == 1 else 'sessions'} ended ({keys})"


def env_failures(snapshot: Snapshot) -> str:
    """Return, in words, how often envs of connected workers have failed, and the newest failure; "" for none.

    The first failure is told too where it had another cause.
    """
    failed = [
        (number(state.get("env_failure_age_s")), slot, state)
        for slot, state in snapshot.workers.items()
        if number(state.get("env_failures"))
    ]
    if not failed:
        return ""
    age_s, slot, state = min(failed, key=lambda one: one[0])
    total = sum(number(state["env_failures"]) for _, _, state in failed)
    newest = one_line(str(state.get("env_failure", ""))[:MOST_SHORT_DETAIL])
    told = f"{total:,.0f}, the newest {age_s:.0f} s ago (worker-{slot}: {newest})"
    if len(snapshot.failures) < 2:
        return told
    first = min(snapshot.failures, key=lambda group: group.first_unix_s)
    cause = one_line(f"{first.kind}: {first.exception}: {first.message}"[:MOST_SHORT_DETAIL])
    return f"{told}, the first ({cause}, {first.count:,} of this kind)"


def duration(seconds: float) -> str:
    """Return a time span in at most two units: 12 s, 3 min 5 s, 2 h 4 min, 3 d 1 h."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    for unit, one, smaller, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= one:
            rest = whole % one // part
            return f"{whole // one} {unit} {rest} {smaller}" if rest else f"{whole // one} {unit}"
    raise AssertionError(whole)


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


def number(value: Any) -> float:
    """Return a number from a peer or from Redis; 0.0 for any other value, since any program may have written it.

    Numbers above `MOST_COUNT` are among the others: JSON has no place for an `int` of them.
    """
    return float(value) if isinstance(value, int | float) and abs(value) <= MOST_COUNT else 0.0


class ProgressDisplay:
    """Shows views on `stream` as they come. Use it within `with`."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._live = None if chosen_output().quiet else _live(self._stream)
        self.interval_s = LIVE_INTERVAL_S if self._live else LINE_INTERVAL_S
        self._shown = float("-inf")

    def __enter__(self) -> ProgressDisplay:
        if self._live is not None:
            with ignore_closed_reader(self._stream):
                self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            with ignore_closed_reader(self._stream):
                self._live.stop()

    @property
    def is_due(self) -> bool:
        """Return whether the next view will be shown."""
        return time.monotonic() - self._shown >= self.interval_s

    def show(self, view: ProgressView, *, last: bool = False) -> None:
        """Show `view`, unless the last one is too recent and more will follow. A quiet command shows none."""
        if chosen_output().quiet or not (last or self.is_due):
            return
        self._shown = time.monotonic()
        with ignore_closed_reader(self._stream):
            if self._live is not None:
                self._live.update(progress_table(view), refresh=True)
            else:
                say(view.in_one_line(), self._stream)


def _live(stream: TextIO) -> Live | None:
    """Return a live display; None for a file, a pipe, and a terminal (`TERM=dumb`) that cannot move its cursor.

    Log lines appear above its table, if they go to the same terminal. The table goes away at the end: old numbers, and
    a bar that stands still, would stay between the log and the result.
    """
    console = PrintableConsole(stream)
    if not stream.isatty() or console.is_dumb_terminal:
        return None
    return Live(console=console, auto_refresh=False, transient=True, redirect_stderr=sys.stderr.isatty())


def progress_table(view: ProgressView) -> Table:
    """Return the rows of `view`, with a bar for the way to the goal."""
    table = Table.grid(padding=(0, 2))
    for what, value in view.rows():
        shown: RenderableType = value
        if what == "goal":
            shown = Table.grid(padding=(0, 1))
            shown.add_row(ProgressBar(total=1.0, completed=view.share_done, width=_BAR_WIDTH), value)
        table.add_row(Text(what, style="dim"), shown)
    return table
