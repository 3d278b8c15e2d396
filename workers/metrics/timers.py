"""Measures how long the parts of sampling take, so rarely that it costs next to nothing."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from headrace.workers.metrics.logger import FigureWindow
from headrace.workers.metrics.time_budget import SAMPLING, TimeBudget

P = ParamSpec("P")
R = TypeVar("R")

TIMERS = {
    "sample_timer": "a whole sample() or fragment, callbacks of its end left out",
    "time_between_sampling": "from the end of one to the beginning of the next",
    "env_step_timer": "all envs of a poll, with the checks of what they answer",
    "env_reset_timer": "the resets after the episodes that end in a poll",
    "rlmodule_inference_timer": "a poll's choice of actions: all forward passes, and module_to_env behind them",
    "env_to_module_timer": "a poll's observations on their way through env_to_module",
}
"""Figures of a report, each the mean over the newest `WINDOW` times, in seconds.

Parts of a poll are timed in one poll of `EVERY`, and in each that follows a slow one. Single connectors, envs and
modules are not timed: on a small env the clock would take longer than they do.
"""

_DIVIDED = ("env_step_timer", "rlmodule_inference_timer")

EVERY = 64
SLOW_S = 0.001
"""Seconds of a poll from which the clock costs next to nothing."""
WINDOW = 50


class Timers:
    """The newest times by name, and the runner's time budget. The parts of one runner share one object."""

    def __init__(self) -> None:
        self.budget = TimeBudget()
        self._times: dict[str, deque[float]] = {name: deque(maxlen=WINDOW) for name in TIMERS}
        self._polls = 0
        self._poll_begun = self._sampling_before = 0.0
        self._stands_for = 1
        """Number of polls for which the next timed one stands."""
        self._took = dict.fromkeys(_DIVIDED, 0.0)
        self._begun = 0.0
        self._ended: float | None = None

    def is_due(self) -> bool:
        """Return whether the poll that begins is to be timed. Call it once a poll."""
        self._polls += 1
        return self._polls % EVERY == 1

    def begin_poll(self) -> None:
        """Begin a poll that is timed."""
        self.budget.switch(SAMPLING)
        self._poll_begun, self._sampling_before = time.perf_counter(), self.budget.sampling_s
        self._took = dict.fromkeys(_DIVIDED, 0.0)

    def end_poll(self, inward_s: float, outward_s: float, *, inline: bool) -> None:
        """End a poll that is timed. env_to_module took `inward_s` and module_to_env `outward_s`.

        `inline`: envs step in this process, and the budget has not counted their time yet.
        """
        self.budget.switch(SAMPLING)
        env, inference = (self._took[name] for name in _DIVIDED)
        parts = (env if inline else 0.0, max(0.0, inference - outward_s), inward_s + outward_s)
        self.budget.note_poll(self.budget.sampling_s - self._sampling_before, parts, self._stands_for)
        is_slow = time.perf_counter() - self._poll_begun >= SLOW_S
        self._stands_for = 1 if is_slow else EVERY
        if is_slow:
            self._polls = 0  # the next poll is due

    def timed(self, name: str, call: Callable[P, R]) -> Callable[P, R]:
        """Return a wrapper of `call` that records how long it took, unless it raises."""

        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            begun = time.perf_counter()
            answer = call(*args, **kwargs)
            took = time.perf_counter() - begun
            self._times[name].append(took)
            if name in self._took:
                self._took[name] += took
            return answer

        return run

    def begin_sample(self) -> None:
        """Note that sampling begins."""
        self._begun = time.perf_counter()
        if self._ended is not None:
            self._times["time_between_sampling"].append(self._begun - self._ended)

    def end_sample(self) -> None:
        """Note that the sample is delivered."""
        self._ended = time.perf_counter()
        self._times["sample_timer"].append(self._ended - self._begun)

    def windows(self) -> list[FigureWindow]:
        """Return the windows for a report."""
        return [FigureWindow((name,), "mean", times) for name, times in self._times.items()]
