"""The restart policy of a process: exponential backoff with jitter, and a circuit breaker for crash loops."""

from __future__ import annotations

import random
from collections import deque

BACKOFF_S = 0.2
"""Seconds of the pause before the first restart. It doubles each time."""
LONG_LIFE = 10
"""A process that lived for so many times the first pause, and had not died before, starts again without one."""

WINDOW_S = 60.0
"""Seconds of a process's running time in which `supervisor.restart_attempts` are tolerated."""
_LONGEST_BACKOFF = 50.0
"""Pauses before a restart grow to so many times `BACKOFF_S`."""


class RestartPolicy:
    """Decides when one process is started again.

    The window is measured in the process's own running time, not in wall time. In wall time, the growing pauses would
    move the deaths of a crash loop out of the window.

    Lives that delivered nothing count at any pace, until a life has delivered: a run without progress ends.
    """

    def __init__(self, attempts: int, rng: random.Random) -> None:
        self._attempts = attempts
        self._rng = rng
        self._uptime_s = 0.0
        self._deaths: deque[float] = deque()
        self.fruitless = 0
        """Lives in a row that have delivered nothing."""

    def after_death(self, lived_s: float, *, has_delivered: bool = True) -> float | None:
        """Return the seconds to wait before the next start; None when the attempts are spent."""
        self.fruitless = 0 if has_delivered else self.fruitless + 1
        self._uptime_s += lived_s
        self._deaths.append(self._uptime_s)
        while self._deaths[0] <= self._uptime_s - WINDOW_S:
            self._deaths.popleft()
        if max(len(self._deaths), self.fruitless) > self._attempts:
            return None
        if len(self._deaths) == 1 and lived_s >= LONG_LIFE * BACKOFF_S:
            return 0.0
        full = BACKOFF_S * min(2.0 ** min(len(self._deaths) - 1, 30), _LONGEST_BACKOFF)
        return full * self._rng.uniform(0.5, 1.0)

    @property
    def deaths_in_window(self) -> int:
        """Return the number of deaths that count at present."""
        return len(self._deaths)
