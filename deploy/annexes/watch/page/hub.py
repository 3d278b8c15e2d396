"""The newest state of a fleet, for all viewers of the page. One thread reads Redis; slow viewers skip states."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Iterable
from contextlib import suppress

import orjson

from headrace.deploy.annexes.watch.state.series import Series, SeriesReader
from headrace.deploy.monitoring.facts import Facts
from headrace.schemas.accounts.redis_keys import RINGS

WANTED_S = 10.0
"""Seconds for which a request counts as interest in new states."""
_LOOK_S = 0.25
"""Interval at which a wait looks whether a viewer has come."""
_OLD_S = 2.0


class Hub:
    """Passes states from the thread that reads Redis to the event loop that serves viewers.

    The reading thread calls `publish`, `wait` and `end`. The event loop runs the coroutines. Both may call the rest.
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
        self.viewers = 0
        """Streams of states that are open."""
        self.series_lock = threading.Lock()
        self._readers: dict[int, SeriesReader] = {}
        self._published_at = 0.0
        self._wanted_at = time.monotonic()
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news: asyncio.Event | None = None

    # The reading thread.

    def publish(self, state: object, facts: Facts | None = None) -> None:
        """Replace the newest state and wake all viewers that wait for it."""
        text = orjson.dumps(state, option=orjson.OPT_NON_STR_KEYS)
        self._published_at, self.facts = time.monotonic(), facts
        self._tell(text)

    def take_series(self, readers: Iterable[tuple[int, SeriesReader]]) -> None:
        """Serve the curves of these (interval of the ring in s, reader) pairs from now on."""
        self._readers = dict(readers)

    def end(self) -> None:
        """Let every viewer's stream end once it has sent the newest state."""
        self.has_ended = True
        self._tell(self.newest)

    def wait(self, stopping: threading.Event, shortest_s: float, longest_s: float) -> None:
        """Wait until the next read is due: after `shortest_s` while a viewer looks, else after `longest_s`."""
        began = time.monotonic()
        while not stopping.is_set():
            now = time.monotonic()
            due_s = began - now + (shortest_s if now - self._wanted_at < WANTED_S else longest_s)
            if due_s <= 0:
                break
            with suppress(queue.Empty):
                self._wakes.get(timeout=min(due_s, _LOOK_S))
                break
        with suppress(queue.Empty):
            while True:
                self._wakes.get_nowait()

    def wake(self) -> None:
        """End the wait for the next read. Any thread may call it, and a signal handler too."""
        self._wakes.put(None)

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
            self.want()
            self._news.clear()
            if self.number <= number:
                try:
                    await asyncio.wait_for(self._news.wait(), min(left, WANTED_S / 2))
                except TimeoutError:
                    continue
        return self.number

    async def fresh(self, timeout_s: float) -> None:
        """Wait until the newest state is at most some seconds old, but not longer than the timeout."""
        if not self.has_ended and (not self.number or time.monotonic() - self._published_at > _OLD_S):
            await self.newer_than(self.number, timeout_s)

    def want(self) -> None:
        """Note that a viewer looks. Wake the reading thread if its newest state is old."""
        now = time.monotonic()
        self._wanted_at = now
        if now - self._published_at > _OLD_S:
            self.wake()

    def series(self, interval_s: int, after_unix_s: float, names: Iterable[str] | None) -> Series:
        """Return curves after a time. Takes some ms, and the reading thread may wait for it."""
        with self.series_lock:
            reader = self._readers.get(interval_s)
            return reader.series(after_unix_s, names) if reader is not None else Series(interval_s, [], {})


INTERVALS = tuple(seconds for _, seconds, _ in RINGS)
