"""Reading HTTP requests: their paths, tokens and bodies. Steps, the most frequent requests, take a short path."""

from __future__ import annotations

import hmac
from collections.abc import Set
from difflib import get_close_matches
from functools import lru_cache
from typing import Any
from urllib.parse import unquote_to_bytes

import orjson

from headrace.schemas.errors.serving import MessageTooLargeError, ServingError
from headrace.schemas.frames.wire import DEFAULT_LIMITS, is_deeper
from headrace.schemas.messages import read
from headrace.schemas.peers.http_hosts import is_known_host
from headrace.workers.serving.episode_codec import EpisodeCodec
from headrace.workers.serving.http.connection import HttpRequest
from headrace.workers.serving.serving_messages import AnyStep, ClientRequest

TOKEN_HEADER = "Headrace-Client"
"""Every request of a session has its token in this header."""
_TOKEN = TOKEN_HEADER.lower().encode()
_MAX_NUMBER_DIGITS = 19
_MAX_CACHED_PATH = 512
"""Longer paths are not cached: clients choose their length, and the cache holds many."""
_MAX_FIELDS_BYTES = DEFAULT_LIMITS.header_bytes
"""Most bytes of a step's fields other than observation and action, as over ZeroMQ."""
_HEALTH = b"/v1/health"


StepPath = tuple[str, str, int]
"""(session, episode, step) of `PUT /v1/sessions/SESSION/episodes/EPISODE/steps/STEP`."""


def step_path(request: HttpRequest) -> StepPath | None:
    """Return the parts of a step's path; None for any other request."""
    path, _, number = request.target.rpartition(b"/")
    if request.method != b"PUT" or not number.isdigit() or len(number) > _MAX_NUMBER_DIGITS:
        return None
    found = (_cached_episode if len(path) <= _MAX_CACHED_PATH else _episode)(path)
    return None if found is None else (*found, int(number))


def _episode(path: bytes) -> tuple[str, str] | None:
    """Return (session, episode) if `path` is the part of a step's path before its number."""
    match path.split(b"/"):
        case [b"", b"v1", b"sessions", session, b"episodes", episode, b"steps"] if session and episode:
            return text_of(session), text_of(episode)
    return None


_cached_episode = lru_cache(1024)(_episode)
"""All steps of an episode have the same path before their number."""


def step_of(request: HttpRequest, path: StepPath, codec: EpisodeCodec) -> tuple[AnyStep, Any, Any]:
    """Return (message, observation, action) of a step.

    The observation stays as JSON has it, for `read_rows` of the codec. The action is a row, or None where the client
    asks for an action.

    Raises `ServingError`, `DecodeError` and `EnvContractError`; `MessageTooLargeError` for a step with more other
    fields than a ZeroMQ message may have, because infos stay in memory until their chunk is full.
    """
    body = body_of(request)
    if "observation" not in body:
        raise ServingError("a step needs an observation", "bad_request")
    observation = body.pop("observation")
    action = body.pop("action", None)
    if action is not None:
        action = codec.action.read_row(action)
        body["off_policy"] = True
    check_fields(body, codec.step_message)
    if len(request.body) > _MAX_FIELDS_BYTES and (size := len(orjson.dumps(body))) > _MAX_FIELDS_BYTES:
        raise MessageTooLargeError(
            f"{size} bytes besides observation and action; a step may have {_MAX_FIELDS_BYTES} bytes of other fields"
        )
    session, episode, step = path
    body |= {"session": session, "episode": episode, "step": step, "token": token_of(request)}
    return read(codec.step_message, body), observation, action


def body_of(request: HttpRequest) -> dict[str, Any]:
    """Return the body, a JSON object, whatever the Content-Type. An empty body is an empty object.

    Raises `ServingError`.
    """
    raw, most = request.body or b"{}", DEFAULT_LIMITS.header_depth
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ServingError(f"the body is not JSON: {error}", "bad_request") from error
    brackets = raw.count(b"[") + raw.count(b"{")
    if not isinstance(body, dict) or (brackets > most and is_deeper(body, most)):
        raise ServingError(f"the body is no JSON object of at most {most} levels", "bad_request")
    return body


def check_fields(body: dict[str, Any], kind: type[ClientRequest]) -> None:
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


def token_of(request: HttpRequest) -> str:
    """Return the session's token. Raises `ServingError` if the header is missing."""
    token = request.headers.get(_TOKEN)
    if not token:
        raise ServingError(f"the header {TOKEN_HEADER} is missing: a random token of this client's own", "bad_request")
    return token.decode("latin-1")


def knows_token(headers: dict[bytes, bytes], token: bytes) -> bool:
    """Return whether the headers show the server's token."""
    return hmac.compare_digest(headers.get(b"authorization", b""), b"Bearer " + token)


def names_host(headers: dict[bytes, bytes], hosts: frozenset[str]) -> bool:
    """Return whether the Host header names an address, localhost or one of `hosts`; a request without it does."""
    value = headers.get(b"host")
    return value is None or is_known_host(value, hosts)


def asks_for_health(target: bytes, headers: dict[bytes, bytes]) -> bool:
    """Return whether this is a health request without a body."""
    empty = b"transfer-encoding" not in headers and headers.get(b"content-length", b"0") == b"0"
    return empty and target.partition(b"?")[0] == _HEALTH


def text_of(part: bytes) -> str:
    """Decode one part of a path, between two slashes. %2F in it is a slash of the id, not of the path."""
    return unquote_to_bytes(part).decode(errors="replace") if b"%" in part else part.decode(errors="replace")
