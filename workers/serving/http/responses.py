"""What HTTP clients are told: a status and a JSON object, always."""

from __future__ import annotations

import http
from typing import Any, NamedTuple

import orjson

from headrace.schemas.errors import HeadraceError
from headrace.schemas.serving_errors import HTTP_STATUS, code_of, facts_of
from headrace.schemas.wire import PROTOCOL_MAJOR, PROTOCOL_MINOR, MessageKind
from headrace.workers.serving.multi_agent_codec import MultiAgentCodec
from headrace.workers.serving.session_records import Reply
from headrace.workers.serving.space_codec import SpaceCodec

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class HttpAnswer(NamedTuple):
    """A status and the JSON that goes with it."""

    status: int
    body: bytes

    def frame(self, date: bytes, *, keeps: bool, bare: bool = False) -> bytes:
        """The answer as it is sent. Without `keeps` the connection ends with it; a `bare` one is told to HEAD."""
        ends = b"" if keeps else b"connection: close\r\n"
        body = b"" if bare else self.body
        return b"%bdate: %b\r\n%bcontent-length: %d\r\n\r\n%b" % (_head(self.status), date, ends, len(self.body), body)


def json_answer(body: Any, status: int = 200) -> HttpAnswer:
    """`body` as JSON."""
    return HttpAnswer(status, orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY))


def refused(error: HeadraceError) -> HttpAnswer:
    """How an error is told: `{"error": its code, "message": its sentence, "facts": {}}`."""
    return _refusal(code_of(error), str(error), facts_of(error))


def answer_of(reply: Reply, actions: SpaceCodec | MultiAgentCodec) -> HttpAnswer:
    """What the sessions say to a request; `actions` writes the action."""
    body = dict(reply.fields)
    if reply.kind is MessageKind.REJECT:
        return _refusal(body["error"], body["message"], body["facts"])
    del body["request"]
    if reply.action is not None:
        body["action"] = actions.to_json(reply.action)
    return json_answer(body)


def health_answer(counts: dict[str, int]) -> HttpAnswer:
    """The server is alive, and holds so many sessions and episodes."""
    return json_answer({"status": "ok", "protocol": f"{PROTOCOL_MAJOR}.{PROTOCOL_MINOR}", **counts})


def failed() -> HttpAnswer:
    """The server itself is at fault."""
    return _refusal("failed", "the server failed at this; its log says how", {})


def _refusal(code: str, message: str, facts: dict[str, Any]) -> HttpAnswer:
    return json_answer({"error": code, "message": message, "facts": facts}, HTTP_STATUS.get(code, 500))


_HEADS: dict[int, bytes] = {}


def _head(status: int) -> bytes:
    if status not in _HEADS:
        phrase = http.HTTPStatus(status).phrase
        _HEADS[status] = f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\n".encode()
    return _HEADS[status]
