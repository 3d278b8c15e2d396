"""An event loop for one thread: ZeroMQ sockets, file descriptors (pidfds, signals) and timers."""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable
from typing import Any

import zmq

from headrace.schemas.errors import RunDirError

Handler = Callable[[], None]
Clock = Callable[[], float]


class Timer:
    """A pending call. `cancel` may be called at any time."""

    def __init__(self, handler: Handler) -> None:
        self.handler: Handler | None = handler

    def cancel(self) -> None:
        """Never call the handler."""
        self.handler = None


class EventLoop:
    """Calls handlers of readable sources and of due timers, all in the thread that calls `turn`."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.clock = clock
        self.on_error: Callable[[OSError | RunDirError], None] | None = None
        """Gets the error of a file that a handler could not use, and the loop goes on. None: `turn` raises it."""
        self._poller = zmq.Poller()
        self._handlers: dict[Any, Handler] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()

    def watch(self, source: int | zmq.Socket[bytes], handler: Handler) -> None:
        """Call `handler` whenever `source` is readable."""
        self._handlers[source] = handler
        self._poller.register(source, zmq.POLLIN)

    def forget(self, source: int | zmq.Socket[bytes]) -> None:
        """Stop watching `source`. Call it before the source is closed."""
        del self._handlers[source]
        self._poller.unregister(source)

    def call_later(self, delay_s: float, handler: Handler) -> Timer:
        """Call `handler` once, `delay_s` seconds from now."""
        timer = Timer(handler)
        heapq.heappush(self._timers, (self.clock() + delay_s, next(self._numbers), timer))
        return timer

    def turn(self, timeout_s: float) -> None:
        """Wait until something happens, at most `timeout_s`, and handle it."""
        for source, _ in self._poller.poll(self._wait_ms(timeout_s)):
            handler = self._handlers.get(source)  # an earlier handler of this turn may have forgotten it
            if handler is not None:
                self._call(handler)
        while self._timers and self._timers[0][0] <= self.clock():
            timer = heapq.heappop(self._timers)[2]
            if timer.handler is not None:
                self._call(timer.handler)

    def _call(self, handler: Handler) -> None:
        try:
            handler()
        except (OSError, RunDirError) as error:
            if self.on_error is None:
                raise
            self.on_error(error)

    def turn_until(self, done: Callable[[], bool], deadline_s: float) -> bool:
        """Turn until `done()`. Return False when `deadline_s` seconds passed first."""
        until = self.clock() + deadline_s
        while not done():
            left = until - self.clock()
            if left <= 0:
                return False
            self.turn(min(left, 0.1))
        return True

    def _wait_ms(self, timeout_s: float) -> int:
        next_timer_s = self._timers[0][0] - self.clock() if self._timers else timeout_s
        return max(0, math.ceil(1000 * min(timeout_s, next_timer_s)))  # rounded down, it would spin for the last ms
