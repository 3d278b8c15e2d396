"""Writing HTTP responses: always a status and a JSON object."""

from __future__ import annotations

import http
from functools import cache
from typing import Any, NamedTuple

import orjson

from headrace.schemas.errors import HeadraceError
from headrace.schemas.errors.serving import HTTP_STATUS, code_of, facts_of
from headrace.schemas.frames.wire import PROTOCOL_MAJOR, PROTOCOL_MINOR, MessageKind
from headrace.workers.serving.episode_codec import MultiAgentCodec
from headrace.workers.serving.session_records import Reply
from headrace.workers.serving.space_codec import SpaceCodec


class HttpAnswer(NamedTuple):
    """A status and a body of JSON."""

    status: int
    body: bytes

    def frame(self, *, keep_alive: bool, head_only: bool = False) -> bytes:
        """Return the bytes to send. Without `keep_alive` they tell the client that the connection ends.

        `head_only` leaves out the body, for a HEAD request.
        """
        ends = b"" if keep_alive else b"connection: close\r\n"
        body = b"" if head_only else self.body
        return b"%b%bcontent-length: %d\r\n\r\n%b" % (_head(self.status), ends, len(self.body), body)


def json_answer(body: Any, status: int = 200) -> HttpAnswer:
    """Write `body` as JSON."""
    return HttpAnswer(status, orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY))


def refused(error: HeadraceError) -> HttpAnswer:
    """Write an error as `{"error": code, "message": sentence, "facts": {...}}`, with the status of its code."""
    return _refusal(code_of(error), str(error), facts_of(error))


def answer_of(reply: Reply, actions: SpaceCodec | MultiAgentCodec) -> HttpAnswer:
    """Write a reply of the sessions. `actions` writes its action."""
    body = dict(reply.fields)
    if reply.kind is MessageKind.REJECT:
        return _refusal(body["error"], body["message"], body["facts"])
    body.pop("request", None)
    if reply.action is not None:
        body["action"] = actions.to_json(reply.action)
    return json_answer(body)


def health_answer(counts: dict[str, int]) -> HttpAnswer:
    """Write the answer to a health request, with the counts of sessions and episodes."""
    return json_answer({"status": "ok", "protocol": f"{PROTOCOL_MAJOR}.{PROTOCOL_MINOR}", **counts})


def _refusal(code: str, message: str, facts: dict[str, Any]) -> HttpAnswer:
    return json_answer({"error": code, "message": message, "facts": facts}, HTTP_STATUS.get(code, 500))


@cache
def _head(status: int) -> bytes:
    return f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n".encode()
