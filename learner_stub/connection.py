"""The shared parts of a learner's stream and publisher: one token for each process and broker, sockets, joint pumping.

To pump a connection is to receive what has arrived and to send what is due.
"""

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
from headrace.schemas.messages import Version
from headrace.schemas.wire import Buffer

_TOKENS: dict[tuple[int, str], str] = {}
_STREAMING: set[str] = set()
_PUBLISHED: dict[str, Version] = {}
_PUMPED: weakref.WeakSet[Pumpable] = weakref.WeakSet()


class Pumpable(Protocol):
    """A connection that must be pumped now and then."""

    token: str

    def pump(self, wait_s: float = 0.0) -> None:
        """Receive what has arrived and send what is due, without waiting."""


def process_token(endpoint: str) -> str:
    """Return the token by which the broker at `endpoint` knows this process. Stream and publisher share it."""
    return _TOKENS.setdefault((os.getpid(), endpoint), os.urandom(8).hex())


def stream_token(endpoint: str) -> str:
    """Return a stream's token: that of this process, or a new one when another stream of it is open.

    The newer one wins.
    """
    if process_token(endpoint) in _STREAMING:
        del _TOKENS[(os.getpid(), endpoint)]
    token = process_token(endpoint)
    _STREAMING.add(token)
    return token


def forget_token(endpoint: str, token: str) -> None:
    """Forget the token of a closed stream, so that the next connection to `endpoint` is a new learner."""
    _STREAMING.discard(token)
    _PUBLISHED.pop(token, None)
    if _TOKENS.get((os.getpid(), endpoint)) == token:
        del _TOKENS[(os.getpid(), endpoint)]


def move_token(token: str, before: str, after: str) -> None:
    """Note that the broker of the learner with `token` has moved to another endpoint."""
    if _TOKENS.get((os.getpid(), before)) == token:
        del _TOKENS[(os.getpid(), before)]
    _TOKENS[(os.getpid(), after)] = token


def pump_together(member: Pumpable) -> None:
    """Pump the other connections of the same learner too."""
    for other in list(_PUMPED):
        if other is not member and other.token == member.token:
            other.pump()


def note_published(token: str, version: Version) -> None:
    """Note the newest version that the learner with `token` published."""
    _PUBLISHED[token] = version


def forget_published(token: str) -> None:
    """Forget the version that `token` published if no stream is open: the next fleet may count from 1 again."""
    if token not in _STREAMING:
        _PUBLISHED.pop(token, None)


def newest_published(token: str) -> Version:
    """Return the newest version that the learner with `token` published; (0, 0) before the first."""
    return _PUBLISHED.get(token, (0, 0))


def enroll(member: Pumpable) -> None:
    """Let the other connections pump `member` from now on."""
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
        """Send one message. Return False without a connection."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True

    def receive(self, wait_s: float = 0.0) -> list[memoryview] | None:
        """Return the frames of the next message; None if none comes in time.

        Frames are read-only views that keep the message's memory.
        """
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
        """Return the error for a broker that has not answered within `deadline_s`."""
        return self._handshakes.why_silent(deadline_s)

    def _observe_handshakes(self) -> None:
        while int(self._monitor.get(zmq.EVENTS)) & zmq.POLLIN:
            self._handshakes.observe(self._monitor.recv_multipart())

    def close(self, deadline_s: float = 0.5) -> None:
        """Close the socket; messages already sent have `deadline_s` to leave."""
        self._context.destroy(linger=int(deadline_s * 1000))


def now() -> float:
    """Return the time of all sessions, in monotonic seconds."""
    return time.monotonic()
