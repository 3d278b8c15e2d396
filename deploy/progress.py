"""Display of a run's progress: a live table on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table

from headrace.deploy.evaluation_log import describe
from headrace.deploy.goal import Goal, RunNumbers
from headrace.deploy.output import chosen_output
from headrace.deploy.redis_view import Snapshot
from headrace.deploy.std_streams import ignore_closed_reader

LIVE_INTERVAL_S = 0.5
LINE_INTERVAL_S = 5.0
STALE_S = 2.0


@dataclass(frozen=True)
class ProgressView:
    """The values to show at one moment."""

    seconds: float
    numbers: RunNumbers
    goal: Goal
    steps_before: int = 0
    """Number of env steps of earlier runs in the same directory."""
    steps_per_s: float = 0.0
    weights: tuple[int, int] = (0, 0)
    """(learner epoch, seq) of the newest weights."""
    weights_lag: int = 0
    """Number of versions by which the slowest worker's weights are behind the newest."""
    held_batches: int = 0
    restarts: Mapping[str, int] = field(default_factory=dict)
    redis_age_s: float = 0.0
    waiting: str = ""
    """Text that names what the fleet waits for while it takes no step; "" for nothing."""
    evaluation: Mapping[str, Any] | None = None
    """The newest line of evaluations.jsonl, parsed; None before the first."""

    @staticmethod
    def of(
        snapshot: Snapshot | None,
        seconds: float,
        goal: Goal,
        restarts: Mapping[str, int],
        redis_age_s: float,
        evaluation: Mapping[str, Any] | None = None,
    ) -> ProgressView:
        """Return the view of a snapshot; None shows zeros."""
        if snapshot is None:
            return ProgressView(seconds, RunNumbers(), goal, restarts=restarts, redis_age_s=redis_age_s)
        gauges = snapshot.gauges
        return ProgressView(
            seconds=seconds,
            numbers=RunNumbers.of(gauges, snapshot.totals, snapshot.policies),
            goal=goal,
            steps_per_s=gauges.get("env_steps_per_s", 0.0),
            weights=(int(gauges.get("learner_epoch", 0)), int(gauges.get("weights_seq", 0))),
            weights_lag=weights_lag(snapshot),
            held_batches=int(gauges.get("held_batches", 0)),
            restarts=restarts,
            redis_age_s=redis_age_s,
            evaluation=evaluation,
        )

    def rows(self) -> list[tuple[str, str]]:
        """Return (label, value) pairs, in the order in which they are shown."""
        n = self.numbers
        mean = n.show_mean_return()
        if self.goal.until_return is not None:
            mean += f" of {self.goal.until_return:g}"
        rows = [
            ("time", f"{self.seconds:.0f} s"),
            ("env steps", f"{self._steps()} ({self.steps_per_s:,.0f}/s)"),
            ("episodes", f"{n.episodes:,}"),
            ("mean return", mean),
            ("weights", f"{self.weights[0]}/{self.weights[1]} (lag {self.weights_lag})"),
            ("queue", f"{self.held_batches} batches"),
            ("restarts", name_restarts(self.restarts)),
        ]
        if self.evaluation is not None:
            rows.append(("evaluation", describe(self.evaluation)))
        if self.redis_age_s > STALE_S:
            rows.append(("Redis", f"silent for {self.redis_age_s:.0f} s, numbers are old"))
        if self.waiting:
            rows.append(("waiting for", self.waiting))
        return rows

    def _steps(self) -> str:
        steps, until = self.numbers.steps, self.goal.until_steps
        if until is None:
            return f"{steps:,}"
        in_all = f", {steps:,} in all" if self.steps_before else ""
        return f"{max(0, steps - self.steps_before):,} of {until:,}{in_all}"


def name_restarts(restarts: Mapping[str, int]) -> str:
    """Return how many restarts each role had, in words."""
    return ", ".join(f"{count} ({role})" for role, count in restarts.items() if count) or "none"


def weights_lag(snapshot: Snapshot) -> int:
    """Return the most versions by which a worker is behind, among workers in the newest learner epoch."""
    return max([0, *(int(worker.get("weights_behind", 0)) for worker in snapshot.workers.values())])


class ProgressDisplay:
    """Shows views on `stream` as they come. Use it within `with`."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._live = _live(self._stream) if self._stream.isatty() and not chosen_output().quiet else None
        self.interval_s = LIVE_INTERVAL_S if self._live else LINE_INTERVAL_S
        self._shown = float("-inf")

    def __enter__(self) -> ProgressDisplay:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    @property
    def is_due(self) -> bool:
        """Return whether the next view will be shown."""
        return time.monotonic() - self._shown >= self.interval_s

    def show(self, view: ProgressView, *, last: bool = False) -> None:
        """Show `view`, unless the one before is too fresh and more will follow. A quiet command shows none."""
        if chosen_output().quiet or not (last or self.is_due):
            return
        self._shown = time.monotonic()
        with ignore_closed_reader(self._stream):
            if self._live is not None:
                self._live.update(_table(view), refresh=True)
            else:
                line = "  ".join(f"{what} {value}" for what, value in view.rows())
                print(line, file=self._stream, flush=True)


def _live(stream: TextIO) -> Live:
    """Return a live display. Log lines appear above its table, if they go to the same terminal."""
    return Live(console=Console(file=stream), auto_refresh=False, redirect_stderr=sys.stderr.isatty())


def _table(view: ProgressView) -> Table:
    table = Table.grid(padding=(0, 2))
    for what, value in view.rows():
        table.add_row(f"[dim]{what}[/dim]", value)
    return table
