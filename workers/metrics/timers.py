"""Measures how long the parts of sampling take, and where a runner's time goes.

Parts of a poll are timed so rarely that it costs next to nothing. The seconds by part sum to the time since the runner
was made.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import ParamSpec, TypeVar

from headrace.schemas.accounts.worker_figures import TIME_PARTS, TimePart
from headrace.workers.metrics.logger import FigureWindow

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

_TIMED_PARTS = ("env_step_timer", "rlmodule_inference_timer")

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
        self._took = dict.fromkeys(_TIMED_PARTS, 0.0)
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
        self._took = dict.fromkeys(_TIMED_PARTS, 0.0)

    def end_poll(self, inward_s: float, outward_s: float, *, inline: bool) -> None:
        """End a poll that is timed. env_to_module took `inward_s` and module_to_env `outward_s`.

        `inline`: envs step in this process, and the budget has not counted their time yet.
        """
        self.budget.switch(SAMPLING)
        env, inference = (self._took[name] for name in _TIMED_PARTS)
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


SAMPLING = len(TIME_PARTS)
"""Sampling that is not divided into parts yet."""

ENV, INFERENCE, CONNECTORS, SERIALISE, WAIT, OTHER = range(SAMPLING)
_DIVIDED = (ENV, INFERENCE, CONNECTORS)
_KEPT = 0.9
"""Share of the sums over polls that `seconds` keeps for its next call, so that rare slow polls still count."""
_MOST_S = 1.0
"""The most seconds that one poll stands for."""


class TimeBudget:
    """A stopwatch that counts each moment for one part, so the parts sum to the whole.

    The clock is read where a part begins. That costs too much within a poll of small envs, so the time of sampling is
    divided in the proportions of the polls that `Timers` timed. Waiting for envs elsewhere, resets and repairs are
    never divided.
    """

    def __init__(self) -> None:
        self.env_part = ENV
        """The part of what `of_envs` calls."""
        self._spent = [0.0] * (SAMPLING + 1)
        self._part = WAIT
        self._timed = [0.0] * len(_DIVIDED)
        self._timed_s = 0.0
        self._shares = [0.0] * len(_DIVIDED)
        self._at = perf_counter()

    def switch(self, part: int) -> int:
        """Begin a part, and return the one that ends."""
        now, before = perf_counter(), self._part
        self._spent[before] += now - self._at
        self._at, self._part = now, part
        return before

    @contextmanager
    def spent_on(self, part: int) -> Iterator[None]:
        """Count the time of the block as `part`, without that of parts that begin within."""
        before = self.switch(part)
        try:
            yield
        finally:
            self.switch(before)

    def of_envs(self, call: Callable[[], R]) -> R:
        """Return the result of `call`, and count its time as the envs' time."""
        before = self.switch(self.env_part)
        try:
            return call()
        finally:
            self.switch(before)

    @property
    def sampling_s(self) -> float:
        """Return the seconds of sampling that are not divided, as of the newest beginning of a part."""
        return self._spent[SAMPLING]

    def note_poll(self, sampling_s: float, parts_s: Sequence[float], polls: int) -> None:
        """Note a timed poll that stands for `polls` of them.

        Of its `sampling_s`, `parts_s` went to envs, inference and connectors. A negative time is that of a poll in
        which `seconds` was called, and is ignored.
        """
        if sampling_s <= 0.0:
            return
        whole = max(sampling_s, sum(parts_s))
        weight = min(float(polls), max(1.0, _MOST_S / whole))
        self._timed_s += weight * whole
        self._timed = [known + weight * part for known, part in zip(self._timed, parts_s, strict=True)]

    def seconds(self) -> dict[TimePart, float]:
        """Return the seconds by part so far. No part ever decreases."""
        self.switch(self._part)
        if self._timed_s > 0.0:
            self._shares = [part / self._timed_s for part in self._timed]
            self._timed_s, self._timed = _KEPT * self._timed_s, [_KEPT * part for part in self._timed]
        spent, sampling = self._spent, self._spent[SAMPLING]
        for part, share in zip(_DIVIDED, self._shares, strict=True):
            spent[part] += sampling * share
        spent[OTHER] += sampling * max(0.0, 1.0 - sum(self._shares))
        spent[SAMPLING] = 0.0
        return dict(zip(TIME_PARTS, spent, strict=False))
