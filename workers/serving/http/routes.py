"""The paths of the HTTP API, and how a request becomes a message for the sessions.

| path | methods |
|---|---|
| /v1/health | GET |
| /v1/spaces | GET |
| /v1/sessions/SESSION | PUT, DELETE |
| /v1/sessions/SESSION/heartbeat | POST |
| /v1/sessions/SESSION/episodes/EPISODE | PUT, DELETE |
| /v1/sessions/SESSION/episodes/EPISODE/steps/STEP | PUT |

HEAD is allowed where GET is. The server reads steps by `requests.step_path`, which is faster than this table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from enum import Enum, auto
from functools import partial
from urllib.parse import parse_qsl

from headrace.schemas.messages import read
from headrace.workers.serving.http.connection import HttpRequest
from headrace.workers.serving.http.requests import body_of, check_fields, text_of, token_of
from headrace.workers.serving.http.responses import HttpAnswer, json_answer
from headrace.workers.serving.serving_messages import (
    ClientBye,
    ClientHeartbeat,
    ClientHello,
    ClientRequest,
    EpisodeAbort,
    EpisodeStart,
)


class Query(Enum):
    """A question about the server itself, which belongs to no session."""

    HEALTH = auto()
    SPACES = auto()


Routed = ClientRequest | Query | HttpAnswer
Ids = Mapping[str, str]
"""Session and episode, as the path names them."""
Handler = Callable[[HttpRequest, Ids], Routed]


def route(request: HttpRequest) -> Routed:
    """Return the message or query of a request, or the refusal of a path or method that does not exist.

    Raises `ServingError` and `DecodeError`.
    """
    path = request.target.partition(b"?")[0]
    method = b"GET" if request.method == b"HEAD" else request.method
    for pattern, handlers in _ROUTES:
        if found := pattern.fullmatch(path):
            handler = handlers.get(method)
            if handler is None:
                return _unknown(request, 405)
            return handler(request, {name: text_of(part) for name, part in found.groupdict().items()})
    return _unknown(request, 404)


def _message(kind: type[ClientRequest], request: HttpRequest, ids: Ids) -> Routed:
    """Read a message of ids and token only. Ignore the body."""
    return read(kind, {**ids, "token": token_of(request)})


def _start(request: HttpRequest, ids: Ids) -> Routed:
    body = body_of(request)
    check_fields(body, EpisodeStart)
    return read(EpisodeStart, {**body, **ids, "token": token_of(request)})


def _abort(request: HttpRequest, ids: Ids) -> Routed:
    query = request.target.partition(b"?")[2].decode("latin-1")
    reason = dict(parse_qsl(query, keep_blank_values=True)).get("reason", "")
    return read(EpisodeAbort, {**ids, "reason": reason, "token": token_of(request)})


def _unknown(request: HttpRequest, status: int) -> HttpAnswer:
    method, path = request.method.decode("latin-1"), request.target.partition(b"?")[0].decode("latin-1")
    message = f"{method} {path:.200} is nothing that this server knows"
    return json_answer({"error": "bad_request", "message": message, "facts": {}}, status)


_SESSION = rb"/v1/sessions/(?P<session>[^/]+)"
_EPISODE = _SESSION + rb"/episodes/(?P<episode>[^/]+)"
_ROUTES: list[tuple[re.Pattern[bytes], dict[bytes, Handler]]] = [
    (re.compile(rb"/v1/health"), {b"GET": lambda request, ids: Query.HEALTH}),
    (re.compile(rb"/v1/spaces"), {b"GET": lambda request, ids: Query.SPACES}),
    (re.compile(_SESSION), {b"PUT": partial(_message, ClientHello), b"DELETE": partial(_message, ClientBye)}),
    (re.compile(_SESSION + rb"/heartbeat"), {b"POST": partial(_message, ClientHeartbeat)}),
    (re.compile(_EPISODE), {b"PUT": _start, b"DELETE": _abort}),
    (re.compile(_EPISODE + rb"/steps/[^/]+"), {b"PUT": lambda request, ids: _unknown(request, 404)}),
]
"""Steps come here only where `requests.step_path` cannot read them: their number is none, or too long."""
