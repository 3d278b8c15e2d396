"""A listener for ZeroMQ and HTTP together, in one asyncio loop.

    wait         runs the loop until something has come: HTTP connections, the ROUTER, watched descriptors, timers
    deliver_to   hands what came by ZeroMQ and by HTTP to the sessions
    (then the dispatcher's replies are written to their connections, outside the loop)

The loop has no thread of its own: it runs only inside `wait` and `close`, in the thread that calls them. This is why
the server does not use uvicorn, which owns its loop. Needs the extra `http`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Set

from headrace.workers.serving.client_sessions import ClientSessions
from headrace.workers.serving.episode_codec import EpisodeCodec
from headrace.workers.serving.http.server import HttpServer
from headrace.workers.serving.session_records import ServingLimits
from headrace.workers.serving.zmq.listener import ZmqListener


class CombinedListener:
    """A `Listener` for clients of both kinds. `http_socket` listens already.

    `hosts`: names by which clients may call it without a token, beside its addresses.
    """

    def __init__(
        self,
        zmq_listener: ZmqListener,
        codec: EpisodeCodec,
        limits: ServingLimits,
        http_socket: socket.socket,
        token: str | None,
        hosts: Set[str] = frozenset(),
    ) -> None:
        self._zmq = zmq_listener
        self._has_zmq_message = False
        """True if a message may wait at the ROUTER."""
        self._runner = asyncio.Runner(loop_factory=asyncio.SelectorEventLoop)
        self._loop = self._runner.get_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._watched: list[int] = []
        self._http = HttpServer(self._loop, codec, limits, token, hosts)
        try:
            self._runner.run(self._http.open(http_socket))
        except BaseException:
            self._runner.close()
            raise
        for fd in zmq_listener.router_port.fds:
            self._watch(fd, self._on_zmq_message)

    # -- called by the dispatcher -------------------------------------------------------------------------------------

    def watch(self, fd: int) -> None:
        """Have `wait` return when `fd` is readable, too."""
        self._watch(fd, self._loop.stop)

    def wait(self, timeout_s: float) -> None:
        """Block until something has come, at most `timeout_s`. Handles in any case what is ready in the loop."""
        # Asked first: a ROUTER's descriptor shows changes only, not what is there.
        self._has_zmq_message = self._zmq.router_port.wait(0.0)
        if self._has_zmq_message:
            self._loop.stop()
        else:
            self._set_timer(timeout_s)
        self._run_loop()
        if self._http.pending > 1:  # more may have come meanwhile, and one more look costs less than another round
            self._loop.stop()
            self._run_loop()

    def deliver_to(self, sessions: ClientSessions, now: float) -> None:
        """Hand all requests that have arrived to the sessions."""
        if self._has_zmq_message:
            self._zmq.deliver_to(sessions, now)
        self._http.deliver_to(sessions, now)

    def close(self) -> None:
        """Close both listeners. HTTP connections have about a second to send their last answers."""
        for fd in self._watched:
            self._loop.remove_reader(fd)
        if self._timer is not None:
            self._timer.cancel()
        close_connections = self._http.close()
        try:
            self._loop.stop()
            self._run_loop()  # uses up earlier calls of `stop`, which would interrupt the coroutine below
            self._runner.run(close_connections)
        finally:
            self._runner.close()
            self._zmq.close()

    # -- in the loop --------------------------------------------------------------------------------------------------

    def _watch(self, fd: int, call: Callable[[], None]) -> None:
        self._watched.append(fd)
        self._loop.add_reader(fd, call)

    def _on_zmq_message(self) -> None:
        self._has_zmq_message = True
        self._loop.stop()

    def _set_timer(self, timeout_s: float) -> None:
        """Stop the loop after `timeout_s`, or earlier: a timer that is already set stays, as a new one costs more."""
        now = self._loop.time()
        if self._timer is None or not now < self._timer.when() <= now + timeout_s:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(now + timeout_s, self._loop.stop)

    def _run_loop(self) -> None:
        """Run the loop until it is stopped. The thread may be inside another loop, as in a notebook, which waits."""
        outer = asyncio._get_running_loop()
        asyncio._set_running_loop(None)
        try:
            self._loop.run_forever()
        finally:
            asyncio._set_running_loop(outer)
