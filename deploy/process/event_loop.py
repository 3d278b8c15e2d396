"""An event loop for one thread: ZeroMQ sockets, file descriptors (pidfds, signals) and timers. And a watch over it."""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Self

import zmq

from headrace.deploy.process.proc_stat import waits_for_disk
from headrace.deploy.terminal.logs import say_on_stderr
from headrace.schemas.errors import RunDirError

log = logging.getLogger("headrace.supervisor")

SAY_WAITING_S = 5.0
"""Interval of the log lines that say what a wait is for."""
_LOOK_S, _LOOKS = 1.0, 10
_OWN = __name__.partition(".")[0]

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
        self.turns = 0

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
        self.turns += 1
        if self._timers:
            timeout_s = min(timeout_s, self._timers[0][0] - self.clock())
        # rounded up: rounded down, the loop would spin for the last ms
        for source, _ in self._poller.poll(max(0, math.ceil(1000 * timeout_s))):
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

    def wait(
        self, done: Callable[[], bool], deadline_s: float, what: Callable[[], str], level: int = logging.INFO
    ) -> bool:
        """Turn until `done()`, as `turn_until`, and log every 5 s that it waits for `what()`."""
        began, waited_s = time.monotonic(), 0.0
        while waited_s < deadline_s:
            if self.turn_until(done, min(deadline_s - waited_s, SAY_WAITING_S)):
                return True
            waited_s = time.monotonic() - began
            if waited_s < deadline_s:
                log.log(level, "waiting for %s (%.0f s of at most %.0f s)", what(), waited_s, deadline_s)
        return False


class StandstillWatch:
    """Says on stderr, every ten seconds within `with`, that the loop's thread stands still, and in which call.

    A write to a disk that does not answer, as a network's folder, holds the thread, and nothing can end the wait. The
    watch has a thread of its own and writes no file. Enter it in the loop's thread.
    """

    def __init__(self, loop: EventLoop, folder: Path, look_s: float = _LOOK_S) -> None:
        self._loop, self._folder, self._look_s = loop, folder, look_s
        self._closing = threading.Event()
        self._watched = threading.current_thread()
        self._thread = threading.Thread(target=self._run, name="standstill-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        turns, looks = -1, 0  # looks are counted: a process that was stopped itself has looked no more than its loop
        while not self._closing.wait(self._look_s):
            looks = looks + 1 if self._loop.turns == turns else 0
            turns = self._loop.turns
            if looks and looks % _LOOKS == 0:
                self._say(looks * self._look_s)

    def _say(self, seconds: float) -> None:
        frame = sys._current_frames().get(self._watched.ident or 0)
        why = f"it waits for the disk of {self._folder} to answer, as a folder of the network may not"
        if not waits_for_disk(self._watched.native_id or 0):
            why = "it waits for that call to return"
        words = f"this process has stood still for {seconds:.0f} s in {_own_function(frame)}: {why}"
        say_on_stderr("headrace.supervisor", logging.WARNING, words)


def _own_function(frame: FrameType | None) -> str:
    """Return the name of the innermost function of Headrace on the stack."""
    while frame is not None and not frame.f_globals.get("__name__", "").startswith(_OWN):
        frame = frame.f_back
    return frame.f_code.co_qualname if frame is not None else "another library"
