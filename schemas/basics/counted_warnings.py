"""Warnings about mistakes of peers, and of ours: one line for each peer and reason in ten seconds, with a count."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

INTERVAL_S = 10.0
MOST_KINDS = 64
"""Pairs of peer and reason that are counted apart. Later ones share a count: peers cannot fill the memory."""


@dataclass(slots=True)
class _Kind:
    said_at: float
    unsaid: int = 0


class CountedWarnings:
    """Logs to `log`. A repeated warning is counted, and the count is in the next line of its kind."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._clock = log, clock
        self._kinds: dict[tuple[bytes, str], _Kind] = {}

    def failed(self, text: str, error: Exception) -> None:
        """Log an `error` that no message should cause, with its traceback, or count it. It is a mistake of ours."""
        self.warn(b"", type(error).__name__, f"{text}: {error!r}", error)

    def warn(self, peer: bytes, reason: str, text: str, error: Exception | None = None) -> None:
        """Log `text` about a mistake of `peer`, or count it. With `error`, log that as an error with its traceback."""
        now = self._clock()
        key = (peer, reason)
        if key not in self._kinds and len(self._kinds) >= MOST_KINDS:
            self._forget(now)
            if len(self._kinds) >= MOST_KINDS:
                key = (b"", "")
        kind = self._kinds.get(key)
        if kind is not None and now - kind.said_at < INTERVAL_S:
            kind.unsaid += 1
            return
        more = f" ({kind.unsaid:,} more like it since the last such line)" if kind is not None and kind.unsaid else ""
        self._kinds[key] = _Kind(now)
        level = logging.WARNING if error is None else logging.ERROR
        self._log.log(level, "%s%s", text, more, exc_info=error)

    def _forget(self, now: float) -> None:
        """Forget kinds without a count to log, whose last line is old enough."""
        for key, kind in list(self._kinds.items()):
            if now - kind.said_at >= INTERVAL_S and not kind.unsaid:
                del self._kinds[key]
