"""The way in by HTTP: one request of JSON, one answer. What each looks like is in `protocol.md`.

The server runs in a thread of its own and only reads, posts to the desk, and writes. uvicorn runs the event loop,
accepts connections and ends them; `http_connection.py` speaks HTTP on each. Steps go from there to the sessions and
back with nothing in between, all else to a Starlette application. It needs the extra `http`.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import partial
from typing import Any

import uvicorn

from headrace.schemas.errors import HeadraceError
from headrace.schemas.serving_errors import ServerFullError, UnauthorizedError
from headrace.schemas.serving_messages import AnyStep
from headrace.workers.serving.desk import Desk
from headrace.workers.serving.http_answers import HttpAnswer, answer_of, json_answer, refused
from headrace.workers.serving.http_app import HttpApp
from headrace.workers.serving.http_bodies import StepPath, asks_for_health, knows_token, step_of, step_path
from headrace.workers.serving.http_connection import HttpConnection, HttpLimits, HttpRequest
from headrace.workers.serving.records import Reply, ServingLimits
from headrace.workers.serving.sessions import Sessions
from headrace.workers.serving.space_values import SpaceValues

log = logging.getLogger(__name__)

_STOP_S = 5.0
_LOOK_S = 0.25
"""From one look at what takes too long to the next."""


@dataclass(frozen=True, slots=True, eq=False)
class _Asking:
    """A step that waits for its answer, as an address. No other is equal to it."""

    way: HttpWay = field(repr=False)
    connection: HttpConnection
    request: HttpRequest

    def send(self, reply: Reply) -> None:
        """See `Address`."""
        self.way.tell(self, reply)


class HttpWay:
    """Serves on `listener`, a socket of `listen`, until `stop`."""

    def __init__(
        self, desk: Desk, values: SpaceValues, limits: ServingLimits, listener: socket.socket, token: str | None
    ) -> None:
        wait_s, idle_s = min(limits.lease_s / 3, 30.0), max(limits.lease_s, 3 * limits.read_s)
        self.limits = HttpLimits(limits.max_message_bytes, limits.read_s, wait_s, idle_s)
        self.date = b""
        self._desk, self._values = desk, values
        self._token = token.encode() if token is not None else None
        self._app = HttpApp(desk, values, wait_s)
        self._places = connection_places(limits.max_connections)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._asked: list[tuple[AnyStep, _Asking, Any, Any]] = []
        """Steps of one burst, as the sessions take them."""
        self._told: deque[tuple[_Asking, Reply]] = deque()
        desk.after_answers(self._wake)
        self._listener = listener
        self._loop: asyncio.AbstractEventLoop
        self._server = uvicorn.Server(self._config())
        self._connections: set[Any] = self._server.server_state.connections
        """Those uvicorn shuts down in the end."""
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        self._thread.start()

    def _config(self) -> uvicorn.Config:
        def connection(**of_uvicorn: Any) -> HttpConnection:
            return HttpConnection(self)

        http: Any = connection  # uvicorn names a class here, and does nothing but call it
        return uvicorn.Config(
            self._app.asgi,
            http=http,
            loop="asyncio",
            log_config=None,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=1,
        )

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        looking = asyncio.create_task(self._look())
        try:
            await self._server.serve(sockets=[self._listener])
        finally:
            looking.cancel()
            for connection in list(self._connections):
                connection.end()

    async def _look(self) -> None:
        while True:
            self.date = formatdate(usegmt=True).encode()
            now = asyncio.get_running_loop().time()
            for connection in list(self._connections):
                connection.look(now)
            await asyncio.sleep(_LOOK_S)

    def stop(self) -> None:
        """Serve nobody any more. Waits until the thread has ended."""
        self._server.should_exit = True
        self._thread.join(_STOP_S)
        self._listener.close()

    # -- connections --------------------------------------------------------------------------------------------------

    def admit(self, connection: HttpConnection) -> HeadraceError | None:
        """See `HttpPlace`."""
        if len(self._connections) >= self._places:
            return ServerFullError(f"all {self._places} connections are taken; come again later")
        self._connections.add(connection)
        return None

    def gone(self, connection: HttpConnection) -> None:
        """See `HttpPlace`."""
        self._connections.discard(connection)

    def doubt(self, target: bytes, headers: dict[bytes, bytes]) -> HeadraceError | None:
        """See `HttpPlace`: whoever has no token does not get to fill the memory. Health is told to everybody."""
        if self._token is None or knows_token(headers, self._token) or asks_for_health(target, headers):
            return None
        return UnauthorizedError("show the server's token: Authorization: Bearer TOKEN")

    # -- requests -----------------------------------------------------------------------------------------------------

    def hear(self, connection: HttpConnection, request: HttpRequest) -> None:
        """See `HttpPlace`."""
        try:
            path = step_path(request)
            if path is not None:
                self._step(connection, request, path)
                return
        except HeadraceError as error:
            connection.answer(request, refused(error))
            return
        task = asyncio.create_task(self._app.answer(request))
        self._tasks.add(task)
        task.add_done_callback(partial(self._done, connection, request))

    def _step(self, connection: HttpConnection, request: HttpRequest, path: StepPath) -> None:
        message, observation, action = step_of(request, path, self._values)
        if not self._asked:
            self._loop.call_soon(self._ask)  # when all has been read that has come with it
        self._asked.append((message, _Asking(self, connection, request), observation, action))

    def _ask(self) -> None:
        """All at once: each message to the desk wakes the sampler, which would act for the first one alone."""
        asked, self._asked = self._asked, []

        def receive(sessions: Sessions, now: float) -> None:
            for message, asking, observation, action in asked:
                sessions.receive(message, asking, now, observation, action)

        self._desk.post(receive)

    def _done(self, connection: HttpConnection, request: HttpRequest, task: asyncio.Task[HttpAnswer]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("%r failed: %r", request.target[:200], error, exc_info=error)
            failed = {"error": "failed", "message": "the server failed at this; its log says how", "facts": {}}
            connection.answer(request, json_answer(failed, 500))
        elif not task.cancelled():
            connection.answer(request, task.result())

    def tell(self, asking: _Asking, reply: Reply) -> None:
        """Answer a step, soon after the last of those that are answered together. For whoever has the desk's turn."""
        self._told.append((asking, reply))

    def _wake(self) -> None:
        if self._told:
            with suppress(RuntimeError):  # the loop is closed: the server has stopped
                self._loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        while self._told:
            asking, reply = self._told.popleft()
            asking.connection.answer(asking.request, answer_of(reply, self._values.action))


def connection_places(most: int) -> int:
    """So many connections as half of the file descriptors allow: ZeroMQ ends a process that has none left."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    places = most if soft == resource.RLIM_INFINITY else min(most, soft // 2)
    if places < most:
        log.warning("%d HTTP connections at once, not %d: only %d files may be open", places, most, soft)
    return places
