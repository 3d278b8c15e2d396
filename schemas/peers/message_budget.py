"""How often one connection may do what honest peers do rarely."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class MessageBudget:
    """A token bucket. An honest peer never empties it."""

    most: float
    """Messages that may come at once, after a silence."""
    per_s: float
    """Messages that may come in each second on average."""
    left: float = field(default=-1.0)
    """Messages that may come at once now: `most` unless given."""
    clock: Callable[[], float] = time.monotonic
    _at: float = 0.0

    def __post_init__(self) -> None:
        """Begin with a full bucket unless told."""
        self._at = self.clock()
        if self.left < 0:
            self.left = self.most

    def spend(self, cost: float = 1.0) -> bool:
        """Count a message. Return False if there were too many, and then allow those of one more second."""
        now = self.clock()
        self.left = min(self.left + self.per_s * (now - self._at), self.most) - cost
        self._at = now
        if self.left >= 0:
            return True
        self.left = self.per_s
        return False
