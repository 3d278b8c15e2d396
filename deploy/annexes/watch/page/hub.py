"""The newest state of a fleet, for all viewers of the page. One thread reads Redis; slow viewers skip states."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress

import orjson

from headrace.deploy.annexes.watch.state.series import Series, SeriesReader
from headrace.deploy.monitoring.facts import Facts
from headrace.schemas.accounts.redis_keys import RINGS


class Hub:
    """Passes states from the thread that reads Redis to the event loop that serves viewers.

    The reading thread calls `publish` and `end`. The event loop calls the rest.
    """

    def __init__(self) -> None:
        self.number = 0
        """Number of the newest state; 0 before the first."""
        self.newest = b"{}"
        self.newest_event = b""
        """The newest state as a server-sent event. All viewers share it: copies for slow ones would fill memory."""
        self.facts: Facts | None = None
        """The facts of the newest state."""
        self.has_ended = False
        self.series_lock = threading.Lock()
        self.readers: Mapping[int, SeriesReader] = {}
        """The readers of curves, by interval of the ring in s."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news: asyncio.Event | None = None

    # The reading thread.

    def publish(self, state: object, facts: Facts | None = None) -> None:
        """Replace the newest state and wake all viewers that wait for it."""
        self.facts = facts
        self._tell(orjson.dumps(state, option=orjson.OPT_NON_STR_KEYS))

    def end(self) -> None:
        """Let every viewer's stream end once it has sent the newest state."""
        self.has_ended = True
        self._tell(self.newest)

    def _tell(self, text: bytes) -> None:
        self.newest, self.newest_event, self.number = text, b"data: " + text + b"\n\n", self.number + 1
        if self._loop is not None and self._news is not None:
            self._loop.call_soon_threadsafe(self._news.set)

    # The event loop.

    async def newer_than(self, number: int, timeout_s: float) -> int:
        """Wait for a state newer than `number`. Return the newest state's number, which is `number` after a timeout."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop or self._news is None:
            self._loop, self._news = loop, asyncio.Event()
        deadline = loop.time() + timeout_s
        while self.number <= number and (left := deadline - loop.time()) > 0:
            self._news.clear()
            if self.number <= number:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), left)
        return self.number

    def series(self, interval_s: int, after_unix_s: float, names: Iterable[str] | None) -> Series:
        """Return curves after a time. Takes some ms, and the reading thread may wait for it."""
        with self.series_lock:
            reader = self.readers.get(interval_s)
            return reader.series(after_unix_s, names) if reader is not None else Series(interval_s, [], {})


INTERVALS = tuple(seconds for _, seconds, _ in RINGS)
