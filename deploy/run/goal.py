"""The goal of a run: a mean return, a number of steps, or a time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from headrace.broker.files.books_file import EndedLives
from headrace.deploy.process.recorders import recorders_in
from headrace.deploy.run.redis_view import Snapshot
from headrace.schemas.accounts.aborted_episodes import aborted_in_words, doubt
from headrace.schemas.accounts.recorder import read_recorder
from headrace.schemas.settings.config import FleetSection

EPISODES_NEEDED = 100
"""Number of episodes over which a mean return must be taken to count as reached."""

_STEPS = "env_steps_total"


@dataclass(frozen=True)
class RunNumbers:
    """The figures of a run that decide whether its goal is reached, and that its summary shows."""

    steps: int = 0
    """Env steps sampled over all runs in the directory. A step of several agents counts once."""
    episodes: int = 0
    mean_return: float | None = None
    """Mean over the newest `window` episodes; None before the first one has ended."""
    window: int = 0
    mean_returns: Mapping[str, float] = field(default_factory=dict)
    """Mean return by module id, over the newest agents that each policy played; empty in envs of one agent."""
    aborted: int = 0
    """Episodes that were aborted while those of the window finished. No mean has them."""

    @property
    def best_return(self) -> float | None:
        """Return the mean return if it is over enough episodes, with few aborted ones, to compare it with others."""
        return None if self.window < EPISODES_NEEDED or self.doubt else self.mean_return

    @property
    def doubt(self) -> str:
        """Return why the mean return decides nothing, as too many episodes were aborted; "" otherwise."""
        return doubt(self.window, self.aborted)

    @staticmethod
    def of(
        gauges: Mapping[str, float],
        totals: Mapping[str, int],
        policies: Mapping[str, Mapping[str, float]] | None = None,
    ) -> RunNumbers:
        """Take the numbers from one snapshot."""
        window = int(gauges.get("episodes_window", 0))
        return RunNumbers(
            steps=totals.get(_STEPS, 0),
            episodes=totals.get("episodes_total", 0),
            mean_return=gauges.get("episode_return_mean") if window else None,
            window=window,
            mean_returns={m: told["return_mean"] for m, told in (policies or {}).items() if "return_mean" in told},
            aborted=int(gauges.get("episodes_window_aborted", 0)),
        )

    def show_mean_return(self) -> str:
        """Return the mean return in words, that of each policy, and how many episodes these leave out.

        "-" before the first episode has ended.
        """
        if self.mean_return is None:
            return "-"
        by_policy = ", ".join(f"{module_id} {show_return(mean)}" for module_id, mean in self.mean_returns.items())
        notes = "; ".join(filter(None, (by_policy, aborted_in_words(self.window, self.aborted))))
        return f"{show_return(self.mean_return)} over {self.window}" + (f" ({notes})" if notes else "")


def show_return(value: float) -> str:
    """Return a return with one decimal, or as many as show four of its digits: 475.3, 9.342, 0.01230."""
    if not value or not math.isfinite(value):
        return f"{value:.1f}"
    decimals = 3 - math.floor(math.log10(abs(value)))
    return f"{value:.{min(max(decimals, 1), 8)}f}"


def steps_at_start(snapshot: Snapshot, ended: EndedLives, recorders: Path) -> int:
    """Return the env steps of all earlier runs in a run directory, before this one starts anything.

    `snapshot` is the fleet's state in Redis. `ended` has the lives of books.json, which an empty Redis lacks. A worker
    that was killed with its broker may have taken steps that are only in its recorder.
    """
    told = {life: counts.get(_STEPS, 0) for life, counts in snapshot.sources.items()}
    steps = snapshot.totals.get(_STEPS, 0)
    rows = {(row.slot, row.incarnation): row for row in ended.rows}
    for life, row in rows.items():
        if not snapshot.is_folded(life):
            steps += max(0, row.totals.steps_of_envs - told.get(life, 0))
    for slot, lives in ended.folded.items():
        known = sum(count for life, count in told.items() if life[0] == slot and life[1] in lives)
        known += snapshot.folded[slot].row.totals.steps_of_envs if slot in snapshot.folded else 0
        steps += max(0, lives.row.totals.steps_of_envs - known)
    for life, path in recorders_in(recorders):
        reading = read_recorder(path)
        is_folded = snapshot.is_folded(life) or (life[0] in ended.folded and life[1] in ended.folded[life[0]])
        if reading is not None and life not in rows and not is_folded:
            steps += max(0, reading.totals.steps_of_envs - told.get(life, 0))
    return steps


@dataclass(frozen=True)
class Goal:
    """The goal that ends a run, counted from its start or its resume. If all are None, only a signal ends the run."""

    until_return: float | None = None
    until_steps: int | None = None
    timeout_s: float | None = None

    @staticmethod
    def of(section: FleetSection) -> Goal:
        """Return the configured goal."""
        return Goal(section.until_return, section.until_steps, section.timeout_s)

    def reached(self, now: RunNumbers, start: RunNumbers) -> bool:
        """Judge by `now` whether the goal of a run that began at `start` is reached.

        Numbers left by an earlier run in the same directory do not count. So the goal is not reached before the broker
        reports a step of this run: the same write has this run's mean return.
        """
        if now.steps <= start.steps:
            return False
        if self.until_steps is not None and now.steps >= start.steps + self.until_steps:
            return True
        return self.until_return is not None and now.best_return is not None and now.best_return >= self.until_return

    def withheld(self, now: RunNumbers, start: RunNumbers) -> str:
        """Return, in a sentence, why a mean return that is high enough does not reach the goal; "" otherwise."""
        if not now.doubt or self.reached(now, start) or not self.reached(replace(now, aborted=0), start):
            return ""
        return f"a mean return of {show_return(now.mean_return or 0.0)} does not reach the goal: {now.doubt}"

    def in_words(self, start: RunNumbers) -> str:
        """Return, in words, what ends a run that began at `start`, and from where steps count."""
        since = "the start" if not start.steps else f"here, where {start.steps:,} env steps are done"
        words = []
        if self.until_return is not None:
            words.append(f"a mean return of {self.until_return:g} over {EPISODES_NEEDED} episodes that end from now on")
        if self.until_steps is not None:
            words.append(f"{self.until_steps:,} env steps, counted from {since}")
        if self.timeout_s is not None:
            words.append(f"{self.timeout_s:g} s")
        return "until " + ", or ".join(words) if words else "until Ctrl-C, since no goal is given"

    def share_done(self, now: RunNumbers, start: RunNumbers, seconds: float) -> float:
        """Return the share of the way to the nearest goal, 0.0 to 1.0; of the time only where there is no other goal.

        A mean return counts from that of `start`, the first over enough episodes; until there is one it is at 0.
        """
        if self.until_return is self.until_steps is None:
            return min(seconds / self.timeout_s, 1.0) if self.timeout_s else 0.0
        share = (now.steps - start.steps) / self.until_steps if self.until_steps else 0.0
        if self.until_return is not None and now.best_return is not None and start.mean_return is not None:
            way = self.until_return - start.mean_return
            share = max(share, (now.best_return - start.mean_return) / way if way > 0 else 0.0)
        return min(max(share, 0.0), 1.0)

    def late(self, seconds: float) -> bool:
        """Return whether the run has taken longer than it may."""
        return self.timeout_s is not None and seconds >= self.timeout_s

    def has_done_its_time(self, seconds: float, now: RunNumbers, start: RunNumbers) -> bool:
        """Return whether a run that has no goal but its time, and made steps in it, is at its end."""
        return self.late(seconds) and self.until_return is self.until_steps is None and now.steps > start.steps
