"""An event loop that is turned by whoever has the desk's turn, so that what comes by HTTP needs no thread of its own.

    wait ── in the loop: connections, the ROUTER, the bell, what is due ── until something has come
    take_in ── what has come by ZeroMQ and by HTTP, to the sessions
    (the desk settles) ── answers are written to their connections, outside the loop

A loop belongs to a thread only while it runs. It needs the extra `http`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from concurrent import futures

from headrace.workers.serving.http.server import HttpServer
from headrace.workers.serving.records import ServingLimits
from headrace.workers.serving.sessions import Sessions
from headrace.workers.serving.space_values import SpaceValues
from headrace.workers.serving.zmq.frames import FramesDoor


class HttpDoor:
    """Both ways in, as a `desk.Door`. `listener` is a socket of `listen`."""

    def __init__(
        self,
        frames: FramesDoor,
        values: SpaceValues,
        limits: ServingLimits,
        listener: socket.socket,
        token: str | None,
    ) -> None:
        self._frames = frames
        self._speaking = False
        """Whether a message may wait at the ROUTER."""
        self._beside = futures.ThreadPoolExecutor(1, "http")
        """Without a thread until one is needed."""
        self._runner = asyncio.Runner(loop_factory=asyncio.SelectorEventLoop)
        self._loop = self._runner.get_loop()
        self._alarm: asyncio.TimerHandle | None = None
        self._watched: list[int] = []
        self._http = HttpServer(self._loop, values, limits, token)
        try:
            self._runner.run(self._http.open(listener))
        except BaseException:
            self._runner.close()
            raise
        for fd in frames.fds:
            self._watch(fd, self._hear_frames)

    # -- of the desk --------------------------------------------------------------------------------------------------

    def watch(self, fd: int) -> None:
        """See `desk.Door`."""
        self._watch(fd, self._loop.stop)

    def wait(self, timeout_s: float) -> None:
        """See `desk.Door`. What is ready in the loop is done in any case."""
        self._speaking = self._frames.has_message()  # its fd tells of changes only, not of what is there
        if self._speaking:
            self._loop.stop()
        else:
            self._set_alarm(timeout_s)
        self._run()
        if self._http.pending > 1:  # while these were read others have come: a look is cheaper than a turn of their own
            self._loop.stop()
            self._run()

    def take_in(self, sessions: Sessions, now: float) -> None:
        """See `desk.Door`."""
        if self._speaking:
            self._frames.take_in(sessions, now)
        self._http.take_in(sessions, now)

    def close(self) -> None:
        """See `desk.Door`. Connections have a moment to be told their last."""
        for fd in self._watched:
            self._loop.remove_reader(fd)
        if self._alarm is not None:
            self._alarm.cancel()
        end = self._http.close()
        try:
            self._loop.stop()
            self._run()  # else what was asked since the last time would stop it on its way to the end
            self._runner.run(end)
        finally:
            self._runner.close()
            self._beside.shutdown()
            self._frames.close()

    # -- in the loop --------------------------------------------------------------------------------------------------

    def _watch(self, fd: int, call: Callable[[], None]) -> None:
        self._watched.append(fd)
        self._loop.add_reader(fd, call)

    def _hear_frames(self) -> None:
        self._speaking = True
        self._loop.stop()

    def _set_alarm(self, timeout_s: float) -> None:
        """Wake up by then. One that rings earlier stands: to be woken in vain costs less than an alarm a turn."""
        now = self._loop.time()
        if self._alarm is None or not now < self._alarm.when() <= now + timeout_s:
            if self._alarm is not None:
                self._alarm.cancel()
            self._alarm = self._loop.call_at(now + timeout_s, self._loop.stop)

    def _run(self) -> None:
        """Until the loop is stopped."""
        if asyncio._get_running_loop() is None:
            self._loop.run_forever()
            return
        # A thread that is inside a loop, as a notebook's is, may run no second one.
        running = self._beside.submit(self._loop.run_forever)
        try:
            running.result()
        finally:
            if not running.done():  # Ctrl-C: the turn is over, and the next may be another thread's
                self._loop.call_soon_threadsafe(self._loop.stop)
                futures.wait([running])
