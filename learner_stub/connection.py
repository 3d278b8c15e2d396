"""What a learner's stream and publisher share: one token a process and broker, sockets, and being pumped together."""

from __future__ import annotations

import math
import os
import time
import weakref
from typing import Protocol

import zmq

from headrace.schemas import sockets
from headrace.schemas.errors import KeysRefusedError, UnreachableError
from headrace.schemas.handshakes import CLIENT_EVENTS, Handshakes
from headrace.schemas.keys import ClientKeys
from headrace.schemas.wire import Buffer

_TOKENS: dict[tuple[int, str], str] = {}
_STREAMING: set[str] = set()
_PUMPED: weakref.WeakSet[Pumpable] = weakref.WeakSet()


class Pumpable(Protocol):
    """Something whose sockets want looking at now and then."""

    endpoint: str
    token: str

    def pump(self, wait_s: float = 0.0) -> None: ...


def process_token(endpoint: str) -> str:
    """The token by which the broker at `endpoint` knows this process: its stream and its publisher are one learner."""
    return _TOKENS.setdefault((os.getpid(), endpoint), os.urandom(8).hex())


def stream_token(endpoint: str) -> str:
    """A stream's token: that of this process, or a new one when another stream of it is open; the newer one wins."""
    if process_token(endpoint) in _STREAMING:
        del _TOKENS[(os.getpid(), endpoint)]
    token = process_token(endpoint)
    _STREAMING.add(token)
    return token


def forget_token(endpoint: str, token: str) -> None:
    """The next connection to `endpoint` is a new learner: the stream known by `token` was closed."""
    _STREAMING.discard(token)
    if _TOKENS.get((os.getpid(), endpoint)) == token:
        del _TOKENS[(os.getpid(), endpoint)]


def pump_together(member: Pumpable) -> None:
    """Look after the other connections of the same learner too."""
    for other in list(_PUMPED):
        if other is not member and other.token == member.token:
            other.pump()


def enroll(member: Pumpable) -> None:
    """Let others pump `member` from now on."""
    _PUMPED.add(member)


def leave(member: Pumpable) -> None:
    """Undo `enroll`."""
    _PUMPED.discard(member)


class LearnerSocket:
    """A DEALER to the broker's learner endpoint. Raises `KeysRefusedError` when the broker does not let it in."""

    def __init__(self, endpoint: str, keys: ClientKeys | None) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        options = sockets.DEALER | (keys.options() if keys is not None else {})
        for name, value in options.items():
            self._socket.setsockopt(getattr(zmq, name), value)
        self._handshakes = Handshakes(endpoint, keys)
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(CLIENT_EVENTS)
        self._socket.connect(endpoint)

    def send(self, frames: list[Buffer]) -> bool:
        """Send one message; False without a connection."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True

    def receive(self, wait_s: float = 0.0) -> list[memoryview] | None:
        """The frames of the next message, as read-only views that keep its memory; None if none comes in time."""
        if wait_s > 0 and not self._socket.poll(math.ceil(wait_s * 1000)):
            self._observe_handshakes()
            return None
        try:
            frame = self._socket.recv(sockets.DONTWAIT, copy=False)
        except zmq.Again:
            self._observe_handshakes()
            return None
        frames = [frame.buffer]
        while frame.more:
            frame = self._socket.recv(sockets.DONTWAIT, copy=False)
            frames.append(frame.buffer)
        return frames

    def why_silent(self, deadline_s: float) -> KeysRefusedError | UnreachableError:
        """The error for a broker that has not answered within `deadline_s`."""
        return self._handshakes.why_silent(deadline_s)

    def _observe_handshakes(self) -> None:
        while int(self._monitor.get(zmq.EVENTS)) & zmq.POLLIN:
            self._handshakes.observe(self._monitor.recv_multipart())

    def close(self, deadline_s: float = 0.5) -> None:
        """Close; what was sent has so long to leave."""
        self._context.destroy(linger=int(deadline_s * 1000))


def now() -> float:
    """The clock of all sessions: monotonic seconds."""
    return time.monotonic()
