"""All that HTTP clients ask for but steps: a small Starlette application, and how it is run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.schemas.errors import HeadraceError
from headrace.schemas.messages import read
from headrace.schemas.serving_errors import NotYetError
from headrace.schemas.serving_messages import (
    ClientBye,
    ClientHeartbeat,
    ClientHello,
    ClientRequest,
    EpisodeAbort,
    EpisodeStart,
)
from headrace.schemas.wire import PROTOCOL_MAJOR, PROTOCOL_MINOR
from headrace.workers.serving.desk import Event
from headrace.workers.serving.http.connection import HttpRequest
from headrace.workers.serving.http.requests import body_of, check_fields, text_of, token_of
from headrace.workers.serving.http.responses import HttpAnswer, answer_of, json_answer, refused
from headrace.workers.serving.records import Reply
from headrace.workers.serving.sessions import Sessions
from headrace.workers.serving.space_values import SpaceValues

Handler = Callable[[Request], Coroutine[Any, Any, HttpAnswer]]
_ASKED = "headrace.request"
"""Where the scope has the request."""


class Waiting:
    """A request of this application that waits for its answer, as an address. No other is equal to it."""

    def __init__(self) -> None:
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def send(self, reply: Any) -> None:
        """See `Address`."""
        if not self.future.done():  # it was given up
            self.future.set_result(reply)


class HttpApp:
    """For one event loop. `ask` has something done at the desk."""

    def __init__(self, ask: Callable[[Event], None], values: SpaceValues, wait_s: float) -> None:
        self._at_desk, self._values, self._wait_s = ask, values, wait_s
        self.asgi = Starlette(routes=self._routes(), exception_handlers={HTTPException: _no_such_thing})
        self.asgi.router.redirect_slashes = False  # a redirection has no JSON

    async def answer(self, request: HttpRequest) -> HttpAnswer:
        """What there is to say to a request that has arrived whole."""
        path, _, query = request.target.partition(b"?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": request.method.decode("latin-1"),
            "scheme": "http",
            "path": path.decode("latin-1"),  # as it came: `text_of` reads its parts, told apart
            "raw_path": path,
            "query_string": query,
            "headers": list(request.headers.items()),
            _ASKED: request,
        }
        told: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": request.body, "more_body": False}

        async def send(message: Any) -> None:
            told.append(message)

        await self.asgi(scope, receive, send)
        return HttpAnswer(told[0]["status"], b"".join(message.get("body", b"") for message in told[1:]))

    # -- what there is ------------------------------------------------------------------------------------------------

    def _routes(self) -> list[Route]:
        session, episode = "/v1/sessions/{session}", "/v1/sessions/{session}/episodes/{episode}"
        return [
            Route("/v1/health", _answering(self._health), methods=["GET"]),
            Route("/v1/spaces", _answering(self._spaces), methods=["GET"]),
            Route(session, _answering(self._open), methods=["PUT"]),
            Route(session, _answering(self._leave), methods=["DELETE"]),
            Route(f"{session}/heartbeat", _answering(self._beat), methods=["POST"]),
            Route(episode, _answering(self._start), methods=["PUT"]),
            Route(episode, _answering(self._abort), methods=["DELETE"]),
            Route(f"{episode}/steps/{{step}}", _answering(self._no_step), methods=["PUT"]),
        ]

    async def _health(self, request: Request) -> HttpAnswer:
        """Answered at the desk, so that it says whether anybody serves there."""
        waiting = Waiting()

        def look(sessions: Sessions, now: float) -> None:
            waiting.send(sessions.counts())

        self._at_desk(look)
        protocol = f"{PROTOCOL_MAJOR}.{PROTOCOL_MINOR}"
        return json_answer({"status": "ok", "protocol": protocol, **await self._in_time(waiting.future)})

    async def _spaces(self, request: Request) -> HttpAnswer:
        return json_answer(self._values.told)

    async def _open(self, request: Request) -> HttpAnswer:
        return await self._ask(request, ClientHello, {})

    async def _leave(self, request: Request) -> HttpAnswer:
        return await self._ask(request, ClientBye, {})

    async def _beat(self, request: Request) -> HttpAnswer:
        return await self._ask(request, ClientHeartbeat, {})

    async def _start(self, request: Request) -> HttpAnswer:
        body = body_of(request.scope[_ASKED])
        check_fields(body, EpisodeStart)
        return await self._ask(request, EpisodeStart, body)

    async def _abort(self, request: Request) -> HttpAnswer:
        return await self._ask(request, EpisodeAbort, {"reason": request.query_params.get("reason", "")})

    async def _no_step(self, request: Request) -> HttpAnswer:
        """Steps do not come here, unless their numbers are none."""
        raise HTTPException(404)

    # -- how it is asked for ------------------------------------------------------------------------------------------

    async def _ask(self, request: Request, kind: type[ClientRequest], body: dict[str, Any]) -> HttpAnswer:
        told = {name: text_of(part.encode("latin-1")) for name, part in request.path_params.items()}
        message = read(kind, {**body, **told, "token": token_of(request.scope[_ASKED])})
        waiting = Waiting()
        self._at_desk(lambda sessions, now: sessions.receive(message, waiting, now))
        reply: Reply = await self._in_time(waiting.future)
        return answer_of(reply, self._values.action)

    async def _in_time(self, answer: Awaitable[Any]) -> Any:
        try:
            return await asyncio.wait_for(answer, self._wait_s)
        except TimeoutError:
            raise NotYetError(f"no answer within {self._wait_s:g} s; send the same request again") from None


def _answering(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    async def answering(request: Request) -> Response:
        try:
            answer = await handler(request)
        except HeadraceError as error:
            answer = refused(error)
        return Response(answer.body, answer.status)

    return answering


async def _no_such_thing(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.scope['path']:.200} is nothing that this server knows"
    answer = json_answer({"error": "bad_request", "message": message, "facts": {}}, error.status_code)
    return Response(answer.body, answer.status)
