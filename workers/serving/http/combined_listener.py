"""An event loop that is turned by whoever has the desk's turn, so that what comes by HTTP needs no thread of its own.

    wait ── in the loop: connections, the ROUTER, the bell, what is due ── until something has come
    deliver_to ── what has come by ZeroMQ and by HTTP, to the sessions
    (the desk settles) ── answers are written to their connections, outside the loop

A loop belongs to a thread only while it runs. It needs the extra `http`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from concurrent import futures

from headrace.workers.serving.client_sessions import ClientSessions
from headrace.workers.serving.episode_codec import EpisodeCodec
from headrace.workers.serving.http.server import HttpServer
from headrace.workers.serving.session_records import ServingLimits
from headrace.workers.serving.zmq.listener import ZmqListener


class CombinedListener:
    """Both ways in, as a `Listener`. `listener` is a socket of `listen`."""

    def __init__(
        self,
        zmq_listener: ZmqListener,
        codec: EpisodeCodec,
        limits: ServingLimits,
        listener: socket.socket,
        token: str | None,
    ) -> None:
        self._zmq = zmq_listener
        self._has_zmq_message = False
        """Whether a message may wait at the ROUTER."""
        self._thread_pool = futures.ThreadPoolExecutor(1, "http")
        """Without a thread until one is needed."""
        self._runner = asyncio.Runner(loop_factory=asyncio.SelectorEventLoop)
        self._loop = self._runner.get_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._watched: list[int] = []
        self._http = HttpServer(self._loop, codec, limits, token)
        try:
            self._runner.run(self._http.open(listener))
        except BaseException:
            self._runner.close()
            raise
        for fd in zmq_listener.fds:
            self._watch(fd, self._on_zmq_message)

    # -- of the desk --------------------------------------------------------------------------------------------------

    def watch(self, fd: int) -> None:
        """See `Listener`."""
        self._watch(fd, self._loop.stop)

    def wait(self, timeout_s: float) -> None:
        """See `Listener`. What is ready in the loop is done in any case."""
        self._has_zmq_message = self._zmq.has_message()  # its fd tells of changes only, not of what is there
        if self._has_zmq_message:
            self._loop.stop()
        else:
            self._set_timer(timeout_s)
        self._run_loop()
        if self._http.pending > 1:  # while these were read others have come: a look is cheaper than a turn of their own
            self._loop.stop()
            self._run_loop()

    def deliver_to(self, sessions: ClientSessions, now: float) -> None:
        """See `Listener`."""
        if self._has_zmq_message:
            self._zmq.deliver_to(sessions, now)
        self._http.deliver_to(sessions, now)

    def close(self) -> None:
        """See `Listener`. Connections have a moment to be told their last."""
        for fd in self._watched:
            self._loop.remove_reader(fd)
        if self._timer is not None:
            self._timer.cancel()
        end = self._http.close()
        try:
            self._loop.stop()
            self._run_loop()  # else what was asked since the last time would stop it on its way to the end
            self._runner.run(end)
        finally:
            self._runner.close()
            self._thread_pool.shutdown()
            self._zmq.close()

    # -- in the loop --------------------------------------------------------------------------------------------------

    def _watch(self, fd: int, call: Callable[[], None]) -> None:
        self._watched.append(fd)
        self._loop.add_reader(fd, call)

    def _on_zmq_message(self) -> None:
        self._has_zmq_message = True
        self._loop.stop()

    def _set_timer(self, timeout_s: float) -> None:
        """Wake up by then. One that rings earlier stands: to be woken in vain costs less than an alarm a turn."""
        now = self._loop.time()
        if self._timer is None or not now < self._timer.when() <= now + timeout_s:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(now + timeout_s, self._loop.stop)

    def _run_loop(self) -> None:
        """Until the loop is stopped."""
        if asyncio._get_running_loop() is None:
            self._loop.run_forever()
            return
        # A thread that is inside a loop, as a notebook's is, may run no second one.
        running = self._thread_pool.submit(self._loop.run_forever)
        try:
            running.result()
        finally:
            if not running.done():  # Ctrl-C: the turn is over, and the next may be another thread's
                self._loop.call_soon_threadsafe(self._loop.stop)
                futures.wait([running])
