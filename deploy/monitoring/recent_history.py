"""The newest two minutes of a fleet's numbers, from the ring in Redis that has an entry every 5 s."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence

from headrace.deploy.run.redis_view import FleetView

INTERVAL_S = 5
KEPT = 24

Entry = tuple[float, Mapping[str, float]]
"""(unix s by the broker's clock, gauges and totals by name)."""


class RecentHistory:
    """Keeps the newest entries; reads only those that are new, at most every 5 s."""

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque(maxlen=KEPT)
        self._due = 0.0

    def read(self, view: FleetView, reported_unix_s: float | None) -> Sequence[Entry]:
        """Return the entries, the oldest first. `reported_unix_s`: the time of the broker's last report.

        Raises `RedisUnavailableError`.
        """
        now = time.monotonic()
        if reported_unix_s is not None and now >= self._due:
            oldest = reported_unix_s - KEPT * INTERVAL_S
            after = self._entries[-1][0] if self._entries else oldest
            self._entries.extend(view.history(INTERVAL_S, max(after, oldest)))
            self._due = now + INTERVAL_S
        return tuple(self._entries)
