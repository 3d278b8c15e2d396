"""How long a policy server takes to answer, measured for some of the steps."""

from __future__ import annotations

import math
import time

EVERY = 8
SIZE = 256


class Latencies:
    """The newest `SIZE` latencies of one step in `EVERY`, in seconds."""

    def __init__(self) -> None:
        self._ring = [0.0] * SIZE
        self._count = 0
        self._steps = 0

    def begin(self) -> float:
        """Return the current time if this step is measured, else 0."""
        self._steps += 1
        return time.monotonic() if self._steps % EVERY == 1 else 0.0

    def end(self, begun: float) -> None:
        """Note the answer to a step. `begun` is the result of `begin` for that step."""
        if begun:
            self._ring[self._count % SIZE] = time.monotonic() - begun
            self._count += 1

    def quantiles(self) -> tuple[float, float]:
        """Return the median and the 95th percentile; 0 before the first latency."""
        ranked = sorted(self._ring[: min(self._count, SIZE)])
        if not ranked:
            return 0.0, 0.0
        return ranked[(len(ranked) - 1) // 2], ranked[math.ceil(0.95 * len(ranked)) - 1]
