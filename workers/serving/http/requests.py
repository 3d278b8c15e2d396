"""What an HTTP request says, as the sessions take it; steps, of which there are many, without any detour."""

from __future__ import annotations

import hmac
from collections.abc import Set
from difflib import get_close_matches
from functools import lru_cache
from typing import Any
from urllib.parse import unquote_to_bytes

import orjson

from headrace.schemas.messages import read
from headrace.schemas.serving_errors import BadRequestError, MessageTooLargeError
from headrace.schemas.serving_messages import AnyStep, ClientRequest
from headrace.schemas.wire import DEFAULT_CAPS, is_deeper
from headrace.workers.serving.episode_codec import EpisodeCodec
from headrace.workers.serving.http.connection import HttpRequest

TOKEN_HEADER = "Headrace-Client"
"""The session's token, as each request of a client bears it."""
_TOKEN = TOKEN_HEADER.lower().encode()
_LONGEST_NUMBER = 19
_LONGEST_KNOWN = 512
"""A path of more bytes is read anew each time: clients decide how long paths are, and many are kept in mind."""
_MOST_SAID = DEFAULT_CAPS.header_bytes
_HEALTH = b"/v1/health"


StepPath = tuple[str, str, int]
"""`PUT /v1/sessions/{session}/episodes/{episode}/steps/{step}`, told apart."""


def step_path(request: HttpRequest) -> StepPath | None:
    """None for what is no step."""
    path, _, number = request.target.rpartition(b"/")
    if request.method != b"PUT" or not number.isdigit() or len(number) > _LONGEST_NUMBER:
        return None
    found = (_known_episode if len(path) <= _LONGEST_KNOWN else _episode)(path)
    return None if found is None else (*found, int(number))


def _episode(path: bytes) -> tuple[str, str] | None:
    """(session, episode), if that is what comes before a step's number."""
    match path.split(b"/"):
        case [b"", b"v1", b"sessions", session, b"episodes", episode, b"steps"] if session and episode:
            return text_of(session), text_of(episode)
    return None


_known_episode = lru_cache(1024)(_episode)
"""A client says the same before each of its steps."""


def step_of(request: HttpRequest, path: StepPath, codec: EpisodeCodec) -> tuple[AnyStep, Any, Any]:
    """(message, observation, action) of a step: the observation as JSON has it, for `SpaceCodec.read_rows`; the action
    is None where the client asks for one.

    Raises `BadRequestError`, `DecodeError`, `EnvContractError`, and `MessageTooLargeError` for one that says more
    besides than a message by ZeroMQ could: infos stay in memory until their chunk is full.
    """
    body = body_of(request)
    if "observation" not in body:
        raise BadRequestError("a step needs an observation")
    observation = body.pop("observation")
    action = body.pop("action", None)
    if action is not None:
        action = codec.action.read_row(action)
        body["off_policy"] = True
    check_fields(body, codec.step_message)
    if len(request.body) > _MOST_SAID and (size := len(orjson.dumps(body))) > _MOST_SAID:
        raise MessageTooLargeError(f"{size} bytes besides what is seen and done; a step may have {_MOST_SAID}")
    session, episode, step = path
    body |= {"session": session, "episode": episode, "step": step, "token": token_of(request)}
    return read(codec.step_message, body), observation, action


def body_of(request: HttpRequest) -> dict[str, Any]:
    """The body, a JSON object, whatever its content type is called; none is an empty one. Raises `BadRequestError`."""
    raw, most = request.body or b"{}", DEFAULT_CAPS.header_depth
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadRequestError(f"the body is not JSON: {error}") from error
    brackets = raw.count(b"[") + raw.count(b"{")
    if not isinstance(body, dict) or (brackets > most and is_deeper(body, most)):
        raise BadRequestError(f"the body is no JSON object of at most {most} levels")
    return body


def check_fields(body: dict[str, Any], kind: type[ClientRequest]) -> None:
    """Raise `BadRequestError` for what no such request says: a reward with its name misspelt would be lost unsaid.

    By ZeroMQ, where programs of ours speak, it is taken for a newer version's, and passed over.
    """
    fields = _fields(kind)
    if not body.keys() <= fields:
        name = min(body.keys() - fields)[:80]
        near = get_close_matches(name, fields, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise BadRequestError(f"{name!r} is no field of this request{hint}")


@lru_cache
def _fields(kind: type[ClientRequest]) -> Set[str]:
    return kind.model_fields.keys()


def token_of(request: HttpRequest) -> str:
    """The session's; raises `BadRequestError`."""
    token = request.headers.get(_TOKEN)
    if not token:
        raise BadRequestError(f"the header {TOKEN_HEADER} is missing: a random token of this client's own")
    return token.decode("latin-1")


def knows_token(headers: dict[bytes, bytes], token: bytes) -> bool:
    """Whether the client shows the server's token."""
    return hmac.compare_digest(headers.get(b"authorization", b""), b"Bearer " + token)


def asks_for_health(target: bytes, headers: dict[bytes, bytes]) -> bool:
    """Whether it is that and nothing else: there is no body."""
    empty = b"transfer-encoding" not in headers and headers.get(b"content-length", b"0") == b"0"
    return empty and target.partition(b"?")[0] == _HEALTH


def text_of(part: bytes) -> str:
    """What a part of a path says, between its slashes: %2F is no slash of the path, but one of the id."""
    return unquote_to_bytes(part).decode(errors="replace") if b"%" in part else part.decode(errors="replace")
