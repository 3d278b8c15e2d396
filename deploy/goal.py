"""The goal of a run: a mean return, a number of steps, or a time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.schemas.config import FleetSection

EPISODES_NEEDED = 100
"""A mean return counts as reached once it is taken over that many episodes."""


@dataclass(frozen=True)
class RunNumbers:
    """The few numbers by which a goal is judged and of which a summary is made."""

    steps: int = 0
    """Env steps sampled in the fleet's whole life, over all runs in its directory; one counts once for all its agents.
    """
    episodes: int = 0
    mean_return: float | None = None
    """Over the newest `window` episodes; None before the first one has ended."""
    window: int = 0
    mean_returns: Mapping[str, float] = field(default_factory=dict)
    """By module id, over the newest agents that each policy played; empty in an env of one agent."""

    @staticmethod
    def of(
        gauges: Mapping[str, float],
        totals: Mapping[str, int],
        policies: Mapping[str, Mapping[str, float]] | None = None,
    ) -> RunNumbers:
        """Take the numbers from one snapshot."""
        window = int(gauges.get("episodes_window", 0))
        return RunNumbers(
            steps=totals.get("env_steps_sampled_total", 0),
            episodes=totals.get("episodes_total", 0),
            mean_return=gauges.get("episode_return_mean") if window else None,
            window=window,
            mean_returns={
                m: returns["return_mean"] for m, returns in (policies or {}).items() if "return_mean" in returns
            },
        )

    def show_mean_return(self) -> str:
        """Return the mean return in words, and that of each policy; "-" before the first episode has ended."""
        if self.mean_return is None:
            return "-"
        by_policy = ", ".join(f"{module_id} {show_return(mean)}" for module_id, mean in self.mean_returns.items())
        return f"{show_return(self.mean_return)} over {self.window}" + (f" ({by_policy})" if by_policy else "")


def show_return(value: float) -> str:
    """Return a return with one decimal, or as many as show four of its digits: 475.3, 9.342, 0.01230."""
    if not value or not math.isfinite(value):
        return f"{value:.1f}"
    decimals = 3 - math.floor(math.log10(abs(value)))
    return f"{value:.{min(max(decimals, 1), 8)}f}"


@dataclass(frozen=True)
class Goal:
    """The goal that ends a run; all None: only a signal ends it."""

    until_return: float | None = None
    until_steps: int | None = None
    timeout_s: float | None = None

    @staticmethod
    def of(section: FleetSection) -> Goal:
        """Return the configured goal."""
        return Goal(section.until_return, section.until_steps, section.timeout_s)

    def reached(self, now: RunNumbers, start: RunNumbers) -> bool:
        """Judge by `now` whether the goal is reached.

        Numbers left by an earlier run in the same directory do not count. Some step of this run must have been
        reported: this run's mean is in the same write.
        """
        if now.steps <= start.steps:
            return False
        if self.until_steps is not None and now.steps >= self.until_steps:
            return True
        if self.until_return is None or now.mean_return is None:
            return False
        return now.window >= EPISODES_NEEDED and now.mean_return >= self.until_return

    def late(self, seconds: float) -> bool:
        """Return whether the run has taken longer than it may."""
        return self.timeout_s is not None and seconds >= self.timeout_s
