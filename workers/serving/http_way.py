"""The way in by HTTP: one request of JSON, one answer. What each looks like is in `protocol.md`.

The server runs in a thread of its own and only reads, posts to the desk, and writes. It needs the extra `http`.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.schemas.errors import HeadraceError
from headrace.schemas.messages import read
from headrace.schemas.serving_errors import (
    HTTP_STATUS,
    BadRequestError,
    MessageTooLargeError,
    NotYetError,
    UnauthorizedError,
    code_of,
    facts_of,
)
from headrace.schemas.serving_messages import (
    ClientBye,
    ClientHeartbeat,
    ClientHello,
    ClientReject,
    ClientRequest,
    EpisodeAbort,
    EpisodeStart,
)
from headrace.schemas.wire import DEFAULT_CAPS, PROTOCOL_MAJOR, PROTOCOL_MINOR, is_deeper
from headrace.workers.serving.desk import Desk
from headrace.workers.serving.records import Reply, ServingLimits
from headrace.workers.serving.sessions import Sessions
from headrace.workers.serving.space_values import SpaceValues

log = logging.getLogger(__name__)

TOKEN_HEADER = "Headrace-Client"
"""The session's token, as each request of a client bears it."""
_STOP_S = 5.0

Handler = Callable[[Request], Coroutine[Any, Any, Any]]


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """An HTTP request that waits for its answer, as an address. No other is equal to it."""

    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Reply]

    def send(self, reply: Reply) -> None:
        """See `Address`."""
        try:
            self.loop.call_soon_threadsafe(_settle, self.future, reply)
        except RuntimeError:  # the loop is closed: the server has stopped
            log.debug("an answer came after the end of the HTTP server")


def _settle(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():  # it was given up
        future.set_result(value)


class HttpWay:
    """Serves on `listener`, a socket of `listen`, until `stop`."""

    def __init__(
        self, desk: Desk, values: SpaceValues, limits: ServingLimits, listener: socket.socket, token: str | None
    ) -> None:
        self._desk = desk
        self._values = values
        self._limits = limits
        self._token = token
        self._wait_s = min(limits.lease_s / 3, 30.0)
        self._listener = listener
        config = uvicorn.Config(
            Starlette(routes=self._routes(), exception_handlers={HTTPException: _no_such_thing}),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=1,
            h11_max_incomplete_event_size=1 << 16,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._server.run(sockets=[self._listener])

    def stop(self) -> None:
        """Serve nobody any more. Waits until the thread has ended."""
        self._server.should_exit = True
        self._thread.join(_STOP_S)
        self._listener.close()

    # -- what there is ------------------------------------------------------------------------------------------------

    def _routes(self) -> list[Route]:
        session, episode = "/v1/sessions/{session}", "/v1/sessions/{session}/episodes/{episode}"
        return [
            Route("/v1/health", self._answering(self._health), methods=["GET"]),
            Route("/v1/spaces", self._guarded(self._spaces), methods=["GET"]),
            Route(session, self._guarded(self._open), methods=["PUT"]),
            Route(session, self._guarded(self._leave), methods=["DELETE"]),
            Route(f"{session}/heartbeat", self._guarded(self._beat), methods=["POST"]),
            Route(episode, self._guarded(self._start), methods=["PUT"]),
            Route(episode, self._guarded(self._abort), methods=["DELETE"]),
            Route(f"{episode}/steps/{{step:int}}", self._guarded(self._step), methods=["PUT"]),
        ]

    async def _health(self, request: Request) -> Any:
        """Answered by the desk's thread, so that it says whether that lives."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[dict[str, int]] = loop.create_future()

        def look(sessions: Sessions, now: float) -> None:
            counts = sessions.counts()
            loop.call_soon_threadsafe(_settle, future, counts)

        self._desk.post(look)
        return {"status": "ok", "protocol": f"{PROTOCOL_MAJOR}.{PROTOCOL_MINOR}", **await self._in_time(future)}

    async def _spaces(self, request: Request) -> Any:
        return self._values.told

    async def _open(self, request: Request) -> Any:
        return await self._ask(request, ClientHello, {})

    async def _leave(self, request: Request) -> Any:
        return await self._ask(request, ClientBye, {})

    async def _beat(self, request: Request) -> Any:
        return await self._ask(request, ClientHeartbeat, {})

    async def _start(self, request: Request) -> Any:
        return await self._ask(request, EpisodeStart, await self._body(request))

    async def _abort(self, request: Request) -> Any:
        return await self._ask(request, EpisodeAbort, {"reason": request.query_params.get("reason", "")})

    async def _step(self, request: Request) -> Any:
        body = await self._body(request)
        if "observation" not in body:
            raise BadRequestError("a step needs an observation")
        values = self._values
        observation = values.observation.row(body.pop("observation"))
        action = None
        if body.get("action") is not None:
            action = values.action.row(body.pop("action"))
            body["off_policy"] = True
        return await self._ask(request, self._values.step, body, observation, action)

    # -- how it is asked for ------------------------------------------------------------------------------------------

    async def _ask(
        self,
        request: Request,
        kind: type[ClientRequest],
        body: dict[str, Any],
        observation: Any = None,
        action: Any = None,
    ) -> Any:
        token = request.headers.get(TOKEN_HEADER)
        if not token:
            raise BadRequestError(f"the header {TOKEN_HEADER} is missing: a random token of this client's own")
        message = read(kind, {**body, **request.path_params, "token": token})
        loop = asyncio.get_running_loop()
        waiting = _Waiting(loop, loop.create_future())
        self._desk.post(lambda sessions, now: sessions.receive(message, waiting, now, observation, action))
        return self._told(await self._in_time(waiting.future))

    async def _in_time(self, answer: Awaitable[Any]) -> Any:
        try:
            return await asyncio.wait_for(answer, self._wait_s)
        except TimeoutError:
            raise NotYetError(f"no answer within {self._wait_s:g} s; send the same request again") from None

    def _told(self, reply: Reply) -> Any:
        body = reply.message.model_dump(exclude={"request"})
        if isinstance(reply.message, ClientReject):
            return _response(body, HTTP_STATUS.get(reply.message.error, 500))
        if reply.action is not None:
            body["action"] = self._values.action.json(reply.action)
        return body

    async def _body(self, request: Request) -> dict[str, Any]:
        """A JSON object, read no further than it may be long."""
        raw, most = bytearray(), self._limits.max_message_bytes
        async for part in request.stream():
            raw += part
            if len(raw) > most:
                raise MessageTooLargeError(f"a body of more than {most} bytes")
        try:
            body = orjson.loads(raw or b"{}")
        except orjson.JSONDecodeError as error:
            raise BadRequestError(f"the body is not JSON: {error}") from error
        if not isinstance(body, dict) or is_deeper(body, DEFAULT_CAPS.header_depth):
            raise BadRequestError(f"the body is no JSON object of at most {DEFAULT_CAPS.header_depth} levels")
        return body

    def _guarded(self, handler: Handler) -> Handler:
        """For those who have the token."""

        async def guarded(request: Request) -> Any:
            if self._token is not None:
                shown = request.headers.get("Authorization", "")
                if not hmac.compare_digest(shown.encode(), f"Bearer {self._token}".encode()):
                    raise UnauthorizedError("show the server's token: Authorization: Bearer TOKEN")
            return await handler(request)

        return self._answering(guarded)

    def _answering(self, handler: Handler) -> Handler:
        async def answering(request: Request) -> Response:
            try:
                answer = await handler(request)
            except HeadraceError as error:
                return _refused(error)
            except ClientDisconnect:
                return Response(status_code=400)  # for nobody
            return answer if isinstance(answer, Response) else _response(answer)

        return answering


def _refused(error: HeadraceError) -> Response:
    code = code_of(error)
    return _response({"error": code, "message": str(error), "facts": facts_of(error)}, HTTP_STATUS.get(code, 500))


async def _no_such_thing(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path} is nothing that this server knows"
    return _response({"error": "bad_request", "message": message, "facts": {}}, error.status_code)


def _response(body: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY), status, media_type="application/json")
