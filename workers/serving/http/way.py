"""The way in by HTTP: one request of JSON, one answer. What each looks like is in `protocol.md`.

uvicorn accepts connections and ends them; `http_connection.py` speaks HTTP on each. Steps go from there to the sessions
and back with nothing in between, all else to a Starlette application.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections.abc import Coroutine
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import partial
from typing import Any

import uvicorn

from headrace.schemas.errors import HeadraceError
from headrace.schemas.serving_errors import NotYetError, ServerFullError, UnauthorizedError
from headrace.schemas.serving_messages import AnyStep
from headrace.workers.serving.desk import Event
from headrace.workers.serving.http.app import HttpApp
from headrace.workers.serving.http.connection import HttpConnection, HttpLimits, HttpRequest
from headrace.workers.serving.http.requests import StepPath, asks_for_health, knows_token, step_of, step_path
from headrace.workers.serving.http.responses import HttpAnswer, answer_of, json_answer, refused
from headrace.workers.serving.records import Reply, ServingLimits
from headrace.workers.serving.sessions import Sessions
from headrace.workers.serving.space_values import SpaceValues

log = logging.getLogger(__name__)

_LOOK_S = 0.25
"""From one look at what takes too long to the next."""


@dataclass(slots=True, eq=False)
class _Asking:
    """A step, and the address of its answer. No other is equal to it."""

    way: HttpWay = field(repr=False)
    connection: HttpConnection
    request: HttpRequest
    message: AnyStep
    observation: Any
    """As JSON has it."""
    action: Any

    def send(self, reply: Reply) -> None:
        """See `Address`."""
        self.way.tell(self, reply)


class HttpWay:
    """For one event loop, and whoever turns it: all of this is called in it, or between two of its rounds."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, values: SpaceValues, limits: ServingLimits, token: str | None
    ) -> None:
        wait_s, idle_s = min(limits.lease_s / 3, 30.0), max(limits.lease_s, 3 * limits.read_s)
        self.limits = HttpLimits(limits.max_message_bytes, limits.read_s, wait_s, idle_s)
        self.date = b""
        self._loop, self._values = loop, values
        self._token = token.encode() if token is not None else None
        self._app = HttpApp(self._ask, values, wait_s)
        self._steps: list[_Asking] = []
        self._events: list[Event] = []
        self._closing = False
        self._places = connection_places(limits.max_connections)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._server = uvicorn.Server(self._config())
        self._connections: set[Any] = self._server.server_state.connections
        """Those uvicorn shuts down in the end."""
        self._looking: asyncio.TimerHandle

    def _config(self) -> uvicorn.Config:
        def connection(**of_uvicorn: Any) -> HttpConnection:
            return HttpConnection(self)

        http: Any = connection  # uvicorn names a class here, and does nothing but call it
        return uvicorn.Config(
            self._app.asgi, http=http, log_config=None, lifespan="off", ws="none", timeout_graceful_shutdown=1
        )

    async def open(self, listener: socket.socket) -> None:
        """Let clients in. Not by uvicorn's `serve`, which would take the signals of the process for its own."""
        self._server.config.load()
        self._server.lifespan = self._server.config.lifespan_class(self._server.config)
        await self._server.startup(sockets=[listener])
        self._look()

    def _look(self) -> None:
        self.date, now = formatdate(usegmt=True).encode(), self._loop.time()
        for connection in list(self._connections):
            connection.look(now)
        self._looking = self._loop.call_later(_LOOK_S, self._look)

    def close(self) -> Coroutine[Any, Any, None]:
        """Stop the loop never again, whatever is asked, and `_end`."""
        self._closing = True
        return self._end()

    async def _end(self) -> None:
        """Let nobody in any more, and end connections as soon as what was asked is answered, or a moment later."""
        await self._server.shutdown(sockets=[])
        self._looking.cancel()
        for connection in list(self._connections):
            connection.end()

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
        task = self._loop.create_task(self._app.answer(request))  # the loop may be between two rounds
        self._tasks.add(task)
        task.add_done_callback(partial(self._done, connection, request))

    def _step(self, connection: HttpConnection, request: HttpRequest, path: StepPath) -> None:
        step = _Asking(self, connection, request, *step_of(request, path, self._values))
        self._stop()
        self._steps.append(step)

    def _ask(self, event: Event) -> None:
        self._stop()
        self._events.append(event)

    def _stop(self) -> None:
        """Have the loop's turner come to the desk, once this round is over; between two rounds: once the next one is.

        Raises `NotYetError` in the end, when nothing may stop the loop any more.
        """
        if self._closing:
            raise NotYetError("the server is stopping; send the same again")
        self._loop.stop()

    @property
    def asked(self) -> int:
        """How much there is to `take_in`."""
        return len(self._steps) + len(self._events)

    def take_in(self, sessions: Sessions, now: float) -> None:
        """Hand all that was asked to the sessions."""
        events, self._events = self._events, []
        for event in events:
            event(sessions, now)
        if not self._steps:
            return
        steps, self._steps = self._steps, []
        rows = self._values.observation.rows([step.observation for step in steps])
        for step, row in zip(steps, rows, strict=True):
            if isinstance(row, HeadraceError):
                step.connection.answer(step.request, refused(row))
            else:
                sessions.step(step.message, step, now, row, step.action)

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
        """Answer a step."""
        asking.connection.answer(asking.request, answer_of(reply, self._values.action))


def connection_places(most: int) -> int:
    """So many connections as half of the file descriptors allow: ZeroMQ ends a process that has none left."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    places = most if soft == resource.RLIM_INFINITY else min(most, soft // 2)
    if places < most:
        log.warning("%d HTTP connections at once, not %d: only %d files may be open", places, most, soft)
    return places
