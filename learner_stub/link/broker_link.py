"""A learner's connection to one broker: where that is, and the socket."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Protocol

import zmq

from headrace.learner_stub.link import connection
from headrace.schemas.basics.stop_event import interrupt_raises
from headrace.schemas.credentials.keys import ClientKeys
from headrace.schemas.errors import DecodeError, HeadraceError, UnreachableError, refusal
from headrace.schemas.frames.wire import Buffer, MessageKind, decode_header
from headrace.schemas.messages import Message, Reject, read
from headrace.schemas.peers import sockets
from headrace.schemas.peers.fleet_place import FleetPlace
from headrace.schemas.peers.handshakes import CLIENT_EVENTS, Handshakes

_LEAVING_S = 0.5
"""Seconds that messages have to leave when a connection is closed or dropped: a commit is the caller's word."""


_NO_LOCK = nullcontext()
"""For sockets that one thread uses."""


class BrokerLink:
    """A DEALER to the learner endpoint of the broker at `place`, which it follows when it moves.

    A place without an address gets its socket once it has one. `number` is the broker's among those of the fleet,
    which share the learner's token. With `keeps_unread`, what has arrived can be read after the connection has ended,
    and what is sent without one waits for the next one. Raises `KeysRefusedError` when the broker does not let the
    learner in.
    """

    def __init__(
        self, place: FleetPlace, keys: ClientKeys | None, token: str, number: int, *, keeps_unread: bool = False
    ) -> None:
        self.place = place
        self.token = token
        self.number = number
        self._keys = keys
        self._options = sockets.DEALER | {"IMMEDIATE": int(not keeps_unread)}
        self._own: sockets.OwnSockets | None = None
        if place.endpoint:
            self._connect(place.endpoint)

    def _connect(self, endpoint: str) -> None:
        self._handshakes = Handshakes(endpoint, "learner", self._keys)
        self._own = sockets.OwnSockets(zmq.Context(), f"a learner's connection to {endpoint}", _LEAVING_S)
        self.socket: zmq.Socket[bytes] = self._own.open(zmq.DEALER, {**self._options, **self._handshakes.options()})
        self._monitor: zmq.Socket[bytes] = self._own.monitor(self.socket, CLIENT_EVENTS)
        self.socket.connect(endpoint)

    @property
    def endpoint(self) -> str:
        """Return the broker's address; "" while it is not known."""
        return self.place.endpoint

    @property
    def name(self) -> str:
        """Return the broker's address, for people."""
        return self.endpoint or f"broker {self.number}"

    @property
    def usable(self) -> bool:
        """Return whether the connection is not closed, and of this process."""
        return self._own is None or self._own.usable

    @property
    def connected(self) -> bool:
        """Return whether there is a connection, as far as was observed in `receive`."""
        return self._own is not None and self._handshakes.connected

    def check(self) -> None:
        """Raise `HeadraceError` where the connection is closed, or of the process of which this is a copy by `fork`."""
        if self._own is not None:
            self._own.check()

    def watch(self, poller: zmq.Poller) -> bool:
        """Let a poller wait for the next message. Return whether one has come already."""
        return self._own is not None and sockets.watch(self.socket, poller)

    def send(self, frames: list[Buffer]) -> bool:
        """Send one message. Return False without a connection."""
        if self._own is None:
            return False
        self._own.check()
        try:
            sockets.send(self.socket, frames)
        except zmq.Again:
            return False
        return True

    def received(self) -> Iterator[list[memoryview]]:
        """Yield the frames of each message that has arrived.

        Frames are read-only views that keep the message's memory. What the broker has sent and nobody has read is lost
        when its connection ends.
        """
        if self._own is None:
            return
        self._own.check()
        with suppress(zmq.Again):  # the connection has ended in the midst of the message
            while (frames := sockets.receive(self.socket)) is not None:
                yield frames
            while int(self._monitor.get(zmq.EVENTS)) & zmq.POLLIN:
                self._handshakes.observe(self._monitor.recv_multipart())

    def messages(self, kinds: Mapping[MessageKind, type[Message]]) -> Iterator[Message]:
        """Yield the messages of these kinds that have arrived. Raises `RefusedError` for another protocol's broker."""
        for frames in self.received():
            try:
                kind, header = decode_header(frames)
                if kind in kinds:
                    yield read(kinds[kind], header)
            except DecodeError as error:
                if error.reason == "version_mismatch":
                    raise refusal(error.reason, f"broker at {self.endpoint}: {error.detail}") from error

    def follow(self, present: bool, now: float) -> bool:
        """Note whether the broker answers. Connect to its new address if it has moved, and return whether it has."""
        moved = self.place.observe(present, now)
        if moved is None:
            return False
        connection.move_token(self.token, moved)
        self.close(0.0)
        self._connect(moved)
        return True

    def disowns(self, reject: Reject) -> bool:
        """Return whether a refusal does not count, because it is not of this learner's own broker."""
        return reject.fatal and self.place.disowns(reject.code, reject.detail)

    def why_silent(self, deadline_s: float) -> HeadraceError:
        """Return the error for a broker that has not answered within `deadline_s`. A fleet that ended says so."""
        if (stopped := self.place.stopped()) is not None:
            return UnreachableError("broker", self.endpoint, deadline_s, sentence=str(stopped))
        if self._own is None:
            return self.place.not_found(deadline_s)
        return self._handshakes.why_silent(deadline_s)

    def close(self, deadline_s: float = _LEAVING_S) -> None:
        """Close the socket; messages already sent have `deadline_s` to leave."""
        if self._own is not None:
            self._own.close(deadline_s)


class Watched(Protocol):
    """A connection on which messages arrive."""

    def watch(self, poller: zmq.Poller) -> bool:
        """Let a poller wait for the next message. Return whether one has come already."""


def await_message(links: Sequence[Watched], wait_s: float, lock: AbstractContextManager[object] = _NO_LOCK) -> None:
    """Wait until a message has arrived on one of these connections, at most `wait_s`.

    The sockets are used with `lock` only. Other threads may use them during the wait: a message that they have received
    does not end it.
    """
    poller = zmq.Poller()
    with lock:
        has_come = [link.watch(poller) for link in links]
    if any(has_come):
        return
    with interrupt_raises():
        poller.poll(math.ceil(wait_s * 1000))
