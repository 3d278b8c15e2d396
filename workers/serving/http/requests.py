"""Reading HTTP requests: what a path and a method stand for, and the bodies.

| path | methods |
|---|---|
| /v1/health | GET |
| /v1/spaces | GET |
| /v1/sessions/SESSION | PUT, DELETE |
| /v1/sessions/SESSION/heartbeat | POST |
| /v1/sessions/SESSION/episodes/EPISODE | PUT, DELETE |
| /v1/sessions/SESSION/episodes/EPISODE/steps/STEP | PUT |

HEAD is allowed where GET is. `server.py` answers /v1/health by itself.
"""

from __future__ import annotations

import json
from collections.abc import Set
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote

import orjson

from headrace.schemas.chunks.info_json import MARK
from headrace.schemas.errors.serving import MessageTooLargeError, ServingError
from headrace.schemas.frames.wire import DEFAULT_LIMITS, is_deeper
from headrace.schemas.messages import read
from headrace.workers.serving.episode_codec import EpisodeCodec
from headrace.workers.serving.http.responses import HttpAnswer, json_answer
from headrace.workers.serving.serving_messages import (
    AnyStep,
    ClientBye,
    ClientHeartbeat,
    ClientHello,
    ClientRequest,
    EpisodeAbort,
    EpisodeStart,
    EpisodeStep,
)

TOKEN_HEADER = "Headrace-Client"
"""Every request of a session has its token in this header."""
_TOKEN = TOKEN_HEADER.lower().encode()
_MAX_NUMBER_DIGITS = 19
_MAX_FIELDS_BYTES = DEFAULT_LIMITS.header_bytes
"""Most bytes of a step's fields other than observation and action, as over ZeroMQ."""


@dataclass(slots=True, eq=False)
class HttpRequest:
    """A whole request. Header names are in lower case."""

    method: str
    target: bytes
    headers: dict[bytes, bytes]
    body: bytes
    keep_alive: bool
    """True if the client wants to use the connection for another request."""


class StepRequest(NamedTuple):
    """A step of a client."""

    message: AnyStep
    observation: Any
    """The observation in JSON's types: `read_rows` of the codec converts those of many steps together."""
    action: Any
    """The action as a row; None where the client asks for one."""


Routed = ClientRequest | StepRequest | HttpAnswer


def route(request: HttpRequest, codec: EpisodeCodec) -> Routed:
    """Return the message or step of a request. The answer at once: to /v1/spaces, or that there is no such request.

    A step may have as many bytes of other fields as over ZeroMQ, because infos stay in memory until their chunk is
    full. Infos beyond that are left out. Raises `ServingError`, `DecodeError` and `EnvContractError`;
    `MessageTooLargeError` for a step that is still too large.
    """
    method, (path, _, query) = request.method, request.target.decode("latin-1").partition("?")
    parts = path.split("/")
    if "%" in path:
        parts = [unquote(part) for part in parts]  # %2F is a slash of an id, not of the path
    match method, parts:
        case "PUT", ["", "v1", "sessions", session, "episodes", episode, "steps", step] if _is_number(step):
            return _step(request, codec, _ids(request, session, episode=episode, step=int(step)))
        case "PUT", ["", "v1", "sessions", session, "episodes", episode]:
            body = _body_of(request)
            _check_fields(body, EpisodeStart)
            return read(EpisodeStart, body | _ids(request, session, episode=episode))
        case "DELETE", ["", "v1", "sessions", session, "episodes", episode]:
            reason = dict(parse_qsl(query, keep_blank_values=True)).get("reason", "")
            return read(EpisodeAbort, _ids(request, session, episode=episode, reason=reason))
        case "PUT", ["", "v1", "sessions", session]:
            return read(ClientHello, _ids(request, session))
        case "DELETE", ["", "v1", "sessions", session]:
            return read(ClientBye, _ids(request, session))
        case "POST", ["", "v1", "sessions", session, "heartbeat"]:
            return read(ClientHeartbeat, _ids(request, session))
        case "GET" | "HEAD", ["", "v1", "spaces"]:
            return json_answer(codec.spaces_json)
    message = f"{method} {path:.200} is nothing that this server knows"
    return json_answer({"error": "bad_request", "message": message, "facts": {}}, 404)


def _is_number(text: str) -> bool:
    return text.isdecimal() and len(text) <= _MAX_NUMBER_DIGITS


def _ids(request: HttpRequest, session: str, **others: Any) -> dict[str, Any]:
    """Return the fields of a message that path and headers have, with the session's token."""
    token = request.headers.get(_TOKEN)
    if not token:
        raise ServingError(f"the header {TOKEN_HEADER} is missing: a random token of this client's own", "bad_request")
    return {"session": session, "token": token.decode("latin-1"), **others}


def _step(request: HttpRequest, codec: EpisodeCodec, ids: dict[str, Any]) -> StepRequest:
    body = _body_of(request)
    if "observation" not in body:
        raise ServingError("a step needs an observation", "bad_request")
    observation = body.pop("observation")
    action = body.pop("action", None)
    if action is not None:
        action = codec.action.read_row(action)
        body["off_policy"] = True
    _check_fields(body, codec.step_message)
    most = _MAX_FIELDS_BYTES
    if len(request.body) > most and (size := _size(body)) > most and isinstance(info := body.get("info"), dict):
        left_out = {MARK: [f"info ({size:,} bytes of JSON; at most {most:,} fit)"]}
        body["info"] = left_out if codec.step_message is EpisodeStep else dict.fromkeys(info, left_out)
    if len(request.body) > most and (size := _size(body)) > most:
        raise MessageTooLargeError(
            f"{size} bytes besides observation and action; a step may have {most} bytes of other fields"
        )
    return StepRequest(read(codec.step_message, body | ids), observation, action)


def _size(fields: dict[str, Any]) -> int:
    return len(json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode(errors="surrogatepass"))


def _body_of(request: HttpRequest) -> dict[str, Any]:
    """Return the body, a JSON object, whatever the Content-Type. An empty body is an empty object."""
    raw, most = request.body or b"{}", DEFAULT_LIMITS.header_depth
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        try:  # as many clients write it: with NaN, Infinity and lone surrogates
            body = json.loads(raw.decode(), parse_int=orjson.loads)
        except (ValueError, RecursionError):
            raise ServingError(f"the body is not JSON: {error}", "bad_request") from error
    brackets = raw.count(b"[") + raw.count(b"{")
    if not isinstance(body, dict) or (brackets > most and is_deeper(body, most)):
        raise ServingError(f"the body is no JSON object of at most {most} levels", "bad_request")
    return body


def _check_fields(body: dict[str, Any], kind: type[ClientRequest]) -> None:
    """Raise `ServingError` for a field that `kind` does not have.

    Otherwise a misspelt reward would be lost silently. Over ZeroMQ, unknown fields are ignored, because they come from
    newer versions of our own clients.
    """
    fields = _fields(kind)
    if not body.keys() <= fields:
        name = min(body.keys() - fields)[:80]
        near = get_close_matches(name, fields, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ServingError(f"{name!r} is no field of this request{hint}", "bad_request")


@lru_cache
def _fields(kind: type[ClientRequest]) -> Set[str]:
    return kind.model_fields.keys()
