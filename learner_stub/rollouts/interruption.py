"""Limits an update under way after a stop signal: after a few seconds it ends early or is abandoned."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from headrace.schemas.errors import HeadraceError


class AbandonedUpdateError(HeadraceError):
    """An update was broken off. Module and optimizer have done only a part of it: go on from the last checkpoint."""


def do_nothing() -> None:
    """Do nothing."""


class StopDeadline:
    """Lets updates go on for a while after the stop signal.

    - short_s: seconds after which an update ends with the training steps that are done.
    - last_s: seconds after which no update begins its training steps, and no update that must be `whole` goes on.
    - alive: called at every check of the deadline.
    """

    def __init__(
        self,
        stopping: threading.Event,
        short_s: float,
        last_s: float,
        *,
        whole: bool,
        alive: Callable[[], None] = do_nothing,
    ) -> None:
        self._stopping = stopping
        self._short_s = short_s
        self._last_s = last_s
        self._whole = whole
        self._alive = alive
        self._began: float | None = None

    @property
    def has_passed(self) -> bool:
        """Return whether no update may begin. Time counts from the first call after the signal."""
        return self._stopped_for() >= self._last_s

    def check(self) -> None:
        """Raise `AbandonedUpdateError` once no update may begin."""
        if self.has_passed:
            raise AbandonedUpdateError(f"an update was not done {self._last_s:g} s after the signal to stop")

    def ends_update(self) -> bool:
        """Return whether to end an update early. An update that must be `whole` raises `AbandonedUpdateError`."""
        if self._whole:
            self.check()
            return False
        return self._stopped_for() >= self._short_s

    def _stopped_for(self) -> float:
        self._alive()
        if not self._stopping.is_set():
            return -1.0
        if self._began is None:
            self._began = time.monotonic()
        return time.monotonic() - self._began


NO_INTERRUPTION = StopDeadline(threading.Event(), math.inf, math.inf, whole=False)
"""Lets each update take its time."""
