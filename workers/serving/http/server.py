"""The HTTP server: accepts connections, turns requests into messages for the sessions, and sends the answers.

`connection.py` speaks HTTP/1.1 on each connection, by httptools. asyncio's own server accepts them. `protocol.md` says
what requests and answers look like. A request needs no task and no future: it waits in a list for `deliver_to`, and its
address writes the answer to the connection.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
from collections.abc import Coroutine, Set
from dataclasses import dataclass, field
from typing import Any

from headrace.schemas.basics.counted_warnings import CountedWarnings
from headrace.schemas.errors import HeadraceError
from headrace.schemas.errors.serving import FAILED, ServingError
from headrace.schemas.peers.http_hosts import is_known_host
from headrace.schemas.peers.port_watch import connection_limit
from headrace.workers.serving.client_sessions import ClientSessions
from headrace.workers.serving.dispatcher import Event
from headrace.workers.serving.episode_codec import EpisodeCodec
from headrace.workers.serving.http.connection import HttpConnection
from headrace.workers.serving.http.requests import HttpRequest, StepRequest, route
from headrace.workers.serving.http.responses import HttpAnswer, answer_of, health_answer, refused
from headrace.workers.serving.session_records import Reply, ServingLimits
from headrace.workers.serving.space_codec import read_each

log = logging.getLogger(__name__)

_CHECK_INTERVAL_S = 0.25
"""Seconds between two checks for connections that take too long."""
_OTHER_HOST = (
    "the Host header names another server; use this server's address or localhost, or have it ask for a token "
    "(http.token in keys.dir)"
)
_BACKLOG = 2048
"""Connections that the kernel keeps until they are accepted."""
_CLOSE_TIMEOUT_S = 1.0
"""Seconds that `close` waits for clients to read their last answers."""


@dataclass(slots=True, eq=False)
class HttpAddress:
    """The destination of the answer to one request. Two addresses are never equal."""

    server: HttpServer = field(repr=False)
    connection: HttpConnection
    request: HttpRequest

    def send(self, reply: Reply | Exception) -> None:
        """Write a reply of the sessions, or the refusal for an error, as JSON and send it."""
        self.answer(self.server.write(self.request, reply))

    def answer(self, answer: HttpAnswer) -> None:
        """Send an answer that is already written as JSON."""
        self.connection.answer(self.request, answer)


class HttpServer:
    """Serves one listening socket in one event loop.

    Call every method in the loop, or between two runs of the loop. A request stops the loop, so that the thread that
    runs it calls `deliver_to`.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        codec: EpisodeCodec,
        limits: ServingLimits,
        token: str | None,
        hosts: Set[str],
    ) -> None:
        self.limits = limits
        self.wait_s = min(limits.lease_s / 3, 30.0)
        """Seconds from a request to its answer."""
        self.idle_s = max(limits.lease_s, 3 * limits.read_s)
        """Seconds from an answer to the next request."""
        self._loop, self._codec = loop, codec
        self._authorization = f"Bearer {token}".encode() if token is not None else None
        self._hosts = frozenset(hosts)
        self._steps: list[tuple[HttpAddress, StepRequest]] = []
        self._events: list[tuple[HttpAddress, Event]] = []
        """Events of other requests, for the sessions."""
        self._closing = False
        self._max_connections = connection_limit(limits.max_connections, ports=2)
        self._connections: set[HttpConnection] = set()
        self._warnings = CountedWarnings(log)
        self._server: asyncio.Server
        self._check_timer: asyncio.TimerHandle

    async def open(self, listener: socket.socket) -> None:
        """Accept connections from now on."""
        self._server = await self._loop.create_server(lambda: HttpConnection(self), sock=listener, backlog=_BACKLOG)
        self._check_connections()

    def _check_connections(self) -> None:
        self._check_timer = self._loop.call_later(_CHECK_INTERVAL_S, self._check_connections)
        now = self._loop.time()
        for connection in list(self._connections):
            connection.check_time(now)

    def close(self) -> Coroutine[Any, Any, None]:
        """Refuse all pending and later requests, and return a coroutine that ends the connections.

        From now on no request stops the loop, so the coroutine can run to its end.
        """
        self._closing = True
        for address, _ in [*self._steps, *self._events]:
            address.send(_stopping())
        return self._close_connections()

    async def _close_connections(self) -> None:
        """Accept no more connections; end each when its last answer is sent, at most `_CLOSE_TIMEOUT_S` later."""
        self._server.close()
        for connection in list(self._connections):
            connection.shutdown()
        deadline = self._loop.time() + _CLOSE_TIMEOUT_S
        while self._connections and self._loop.time() < deadline:
            await asyncio.sleep(0.01)
        self._check_timer.cancel()
        for connection in list(self._connections):
            connection.abort()

    # -- connections --------------------------------------------------------------------------------------------------

    def admit(self, connection: HttpConnection) -> HeadraceError | None:
        """Count a new connection; return the reason if there is no room for it."""
        if len(self._connections) >= self._max_connections:
            return ServingError(f"all {self._max_connections} connections are taken; try again later", "server_full")
        self._connections.add(connection)
        return None

    def disconnected(self, connection: HttpConnection) -> None:
        """Forget a connection that has ended."""
        self._connections.discard(connection)

    def refuse_head(self, target: bytes, headers: dict[bytes, bytes]) -> HeadraceError | None:
        """Refuse a request without the server's token. Without a token, refuse a request for another host name.

        The body is not read, so that it cannot fill the memory. The host name matters only without a token, because a
        web page in a browser does not know the token.
        """
        if self._authorization is None:
            is_known = is_known_host(headers.get(b"host", b"localhost"), self._hosts)
            return None if is_known else ServingError(_OTHER_HOST, "bad_request")
        has_body = b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"
        if (_is_health(target) and not has_body) or hmac.compare_digest(
            headers.get(b"authorization", b""), self._authorization
        ):
            return None
        return ServingError("show the server's token: Authorization: Bearer TOKEN", "unauthorized")

    # -- requests -----------------------------------------------------------------------------------------------------

    def handle(self, connection: HttpConnection, request: HttpRequest) -> None:
        """Answer a request, or enqueue it for `deliver_to`."""
        address = HttpAddress(self, connection, request)
        try:
            self._read(address, request)
        except Exception as error:  # noqa: BLE001  one request that fails must not end the worker
            address.send(error)

    def _read(self, address: HttpAddress, request: HttpRequest) -> None:
        if request.method in ("GET", "HEAD") and _is_health(request.target):
            # asked of the sessions, so that the answer shows that they are served
            self._post(address, lambda sessions, now: address.answer(health_answer(sessions.counts())))
            return
        routed = route(request, self._codec)
        match routed:
            case StepRequest():
                self._stop_loop()
                self._steps.append((address, routed))
            case HttpAnswer():
                address.answer(routed)
            case _:
                self._post(address, lambda sessions, now: sessions.receive(routed, address, now))

    def _post(self, address: HttpAddress, event: Event) -> None:
        self._stop_loop()
        self._events.append((address, event))

    def _stop_loop(self) -> None:
        """Have the loop return after this round, or after its next round if it is not running.

        Raises the `ServingError` "not_yet" once the server closes: nothing may stop the loop then.
        """
        if self._closing:
            raise _stopping()
        self._loop.stop()

    @property
    def pending(self) -> int:
        """The number of requests that wait for `deliver_to`."""
        return len(self._steps) + len(self._events)

    def deliver_to(self, sessions: ClientSessions, now: float) -> None:
        """Hand all pending requests to the sessions."""
        events, self._events = self._events, []
        for address, event in events:
            try:
                event(sessions, now)
            except Exception as error:  # noqa: BLE001  as in `handle`
                address.send(error)
        if not self._steps:
            return
        steps, self._steps = self._steps, []
        rows = read_each(self._codec.observation.read_rows, [step.observation for _, step in steps])
        for (address, step), row in zip(steps, rows, strict=True):
            try:
                if isinstance(row, Exception):
                    raise row
                sessions.step(step.message, address, now, row, step.action)
            except Exception as error:  # noqa: BLE001  as in `handle`
                address.send(error)

    def write(self, request: HttpRequest, reply: Reply | Exception) -> HttpAnswer:
        """Write a reply as JSON. An error that is not for the client is logged, and the client is told of that."""
        if isinstance(reply, Exception) and not isinstance(reply, HeadraceError):
            self._warnings.failed(f"{request.target[:200]!r} failed", reply)
            reply = ServingError(FAILED)
        return refused(reply) if isinstance(reply, HeadraceError) else answer_of(reply, self._codec.action)


def _is_health(target: bytes) -> bool:
    return target.partition(b"?")[0] == b"/v1/health"


def _stopping() -> ServingError:
    return ServingError("the server is stopping; send the same again", "not_yet")
