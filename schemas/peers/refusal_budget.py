"""How often the messages of one connection may be refused."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

REFUSED_BURST, REFUSED_PER_S = 1000, 50.0
"""Messages of one connection that may be refused at once, and in each second after that."""


@dataclass(slots=True)
class RefusalBudget:
    """A token bucket. An honest peer, some of whose messages are refused, never empties it."""

    clock: Callable[[], float] = time.monotonic
    _left: float = REFUSED_BURST
    _at: float = 0.0

    def spend(self) -> bool:
        """Count a refusal. Return False if there were too many, and then allow those of one more second."""
        now = self.clock()
        since, self._at = self._at or now, now
        self._left = min(self._left + REFUSED_PER_S * (now - since), REFUSED_BURST) - 1
        if self._left >= 0:
            return True
        self._left = REFUSED_PER_S
        return False
