"""How often one connection may do what honest peers do rarely."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class MessageBudget:
    """A token bucket. An honest peer never empties it."""

    most: float
    """The most that messages may cost at once, after a silence."""
    per_s: float
    """The most that they may cost in each second on average."""
    left: float
    """The most that they may cost at once now."""
    clock: Callable[[], float] = time.monotonic
    _at: float = 0.0

    def __post_init__(self) -> None:
        """Begin now."""
        self._at = self.clock()

    def has(self, cost: float) -> bool:
        """Return whether so much is left now."""
        return min(self.left + self.per_s * (self.clock() - self._at), self.most) >= cost

    def spend(self, cost: float = 1.0) -> bool:
        """Pay for a message. Return False, and leave nothing, if not enough is left."""
        now = self.clock()
        self.left = min(self.left + self.per_s * (now - self._at), self.most) - cost
        self._at = now
        if self.left >= 0:
            return True
        self.left = 0.0
        return False
