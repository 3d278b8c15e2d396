"""Where a runner's time goes: seconds by part, which sum to the time since it was made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TypeVar

from headrace.schemas.accounts.worker_figures import TIME_PARTS, TimePart

R = TypeVar("R")

SAMPLING = len(TIME_PARTS)
"""Sampling that is not divided into parts yet."""

ENV, INFERENCE, CONNECTORS, SERIALISE, WAIT, OTHER = range(SAMPLING)
_DIVIDED = (ENV, INFERENCE, CONNECTORS)
_KEPT = 0.9
"""Share of the sums over polls that `seconds` keeps for its next call, so that rare slow polls still count."""
_MOST_S = 1.0
"""The most seconds that one poll stands for."""


class _Spending:
    """The time of one block. A function with `contextmanager` would take three times as long."""

    __slots__ = ("_before", "_budget", "_part")

    def __init__(self, budget: TimeBudget, part: int) -> None:
        self._budget, self._part = budget, part

    def __enter__(self) -> None:
        self._before = self._budget.switch(self._part)

    def __exit__(self, *_: object) -> None:
        self._budget.switch(self._before)


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

    def spent_on(self, part: int) -> _Spending:
        """Count the time of the block as `part`, without that of parts that begin within."""
        return _Spending(self, part)

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
