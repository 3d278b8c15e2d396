"""One connection to a policy server: says a thing again and again until it is answered, or its time is up."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping
from typing import Any, TypeVar

import zmq
from numpy.typing import NDArray

from headrace.schemas import sockets
from headrace.schemas.errors import ConfigError, DecodeError
from headrace.schemas.handshakes import CLIENT_EVENTS, SUCCEEDED, Handshakes, read_event
from headrace.schemas.keys import ClientKeys
from headrace.schemas.messages import Message, read
from headrace.schemas.serving_errors import BadRequestError, MessageTooLargeError, error_of
from headrace.schemas.serving_messages import ANSWERS, ClientReject, ClientRequest
from headrace.schemas.single_frame import join_frames, split_frame
from headrace.schemas.wire import DEFAULT_LIMITS, Buffer, decode, encode

SERVER = "policy server"
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.5, 4.0
_SLOW_BYTES_S = 10_000_000
"""So slowly may a message arrive: one that comes again before it is answered has to be read again too, and makes all
later ones later. What a broken connection has lost is told by its successor, not by this."""
_LOOK_AGAIN_S = 0.02
"""Without a connection."""
_numbers = itertools.count(1)
AnyRequest = TypeVar("AnyRequest", bound=ClientRequest)


class Connection:
    """DEALER to a policy server, reconnecting by itself. For one thread at a time; it ends with `context`.

    `agreed`: another connection there was let in before.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, keys: ClientKeys | None, *, agreed: bool
    ) -> None:
        self._endpoint = endpoint
        self._socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        options = sockets.DEALER | {"MAXMSGSIZE": DEFAULT_LIMITS.payload_bytes} | (keys.options() if keys else {})
        for name, value in options.items():
            self._socket.setsockopt(getattr(zmq, name), value)
        self._handshakes = Handshakes(endpoint, keys, SERVER, agreed=agreed)
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(CLIENT_EVENTS)
        try:
            self._socket.connect(endpoint)
        except (zmq.ZMQError, TypeError) as error:
            message = f'{endpoint!r:.80} is no address of a policy server ({error}); it is "tcp://HOST:PORT"'
            raise ConfigError(message, key="endpoint") from error
        self._poller = zmq.Poller()
        for socket in (self._socket, self._monitor):
            self._poller.register(socket, zmq.POLLIN)

    def ask(
        self,
        request: ClientRequest,
        timeout_s: float,
        arrays: Mapping[str, NDArray[Any]] | None = None,
        max_message_bytes: int = DEFAULT_LIMITS.payload_bytes,
    ) -> tuple[Message, dict[str, NDArray[Any]]]:
        """The answer to a request, which may go out several times.

        Raises what the server refuses it with, `KeysRefusedError`, `UnreachableError` after `timeout_s`, and
        `MessageTooLargeError`: what is too large for the server would cost the connection, and be sent for ever.
        """
        number = next(_numbers)
        frames = encode(request.KIND, request.model_copy(update={"request": number}).model_dump(), arrays)
        size, frames = sum(map(len, frames)), join_frames(frames)
        if size > max_message_bytes:
            raise MessageTooLargeError(f"a message of {size} bytes, and the server takes {max_message_bytes}")
        now = time.monotonic()
        until, retry_at, retry_s = now + timeout_s, now, _FIRST_RETRY_S + size / _SLOW_BYTES_S
        while now < until:
            if now >= retry_at:
                if self._send(frames):
                    retry_at, retry_s = now + retry_s, max(retry_s, min(2 * retry_s, _LONGEST_RETRY_S))
                else:
                    retry_at = now + _LOOK_AGAIN_S
            for socket, _ in self._poller.poll(max(1, math.ceil((min(until, retry_at) - now) * 1000))):
                if socket is self._monitor:
                    event = self._monitor.recv_multipart()
                    self._handshakes.observe(event)
                    if read_event(event)[0] == SUCCEEDED:  # what went down with the old connection is said at once
                        retry_at = 0.0
                else:
                    answer = self._read(self._socket.recv_multipart(), number)
                    if answer is not None:
                        return answer
            now = time.monotonic()
        raise self._handshakes.why_silent(timeout_s)

    def _send(self, frames: list[Buffer]) -> bool:
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:  # no connection yet
            return False
        return True

    def _read(self, frames: list[bytes], number: int) -> tuple[Message, dict[str, NDArray[Any]]] | None:
        """None for what answers an earlier request, which came again."""
        message = decode(split_frame(frames))
        kind = ANSWERS.get(message.kind)
        if kind is None:
            raise DecodeError("bad_message", f"{message.kind.name} is nothing that a policy server says")
        answer = read(kind, message.header)
        if isinstance(answer, ClientReject) and answer.request in (number, 0):
            raise error_of(answer.error, answer.message, answer.facts)
        return (answer, message.arrays) if getattr(answer, "request", None) == number else None


def request_of(kind: type[AnyRequest], **fields: Any) -> AnyRequest:
    """A request of these fields; raises `BadRequestError`, which names the one that no server would take."""
    try:
        return read(kind, fields)
    except DecodeError as error:
        raise BadRequestError(f"this cannot be asked of a policy server: {error}") from error
