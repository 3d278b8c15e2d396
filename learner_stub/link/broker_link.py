"""A learner's connection to one broker: where that is, and the socket."""

from __future__ import annotations

import math
from collections.abc import Sequence

import zmq

from headrace.learner_stub.link import connection
from headrace.schemas.credentials.keys import PeerKeys
from headrace.schemas.errors import HeadraceError, UnreachableError
from headrace.schemas.frames.wire import Buffer
from headrace.schemas.messages import Reject
from headrace.schemas.peers.fleet_place import FleetPlace


class BrokerLink:
    """The connection to the broker at `place`. It follows the broker when it moves.

    A place without an address gets its socket once it has one. `number` is the broker's among those of the fleet,
    which share the learner's token.
    """

    def __init__(self, place: FleetPlace, keys: PeerKeys | None, token: str, number: int) -> None:
        self.place = place
        self.token = token
        self.number = number
        self._keys = keys
        self._socket = connection.LearnerSocket(place.endpoint, keys) if place.endpoint else None

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
        return self._socket is None or self._socket.usable

    def watch(self, poller: zmq.Poller) -> None:
        """Let a poller wait for the next message."""
        if self._socket is not None:
            poller.register(self._socket.socket, zmq.POLLIN)

    def send(self, frames: list[Buffer]) -> bool:
        """Send one message. Return False without a connection."""
        return self._socket is not None and self._socket.send(frames)

    def receive(self) -> list[memoryview] | None:
        """Return the frames of the next message; None if there is none."""
        return self._socket.receive() if self._socket is not None else None

    def follow(self, present: bool, now: float) -> bool:
        """Note whether the broker answers. Connect to its new address if it has moved, and return whether it has."""
        before = self.endpoint
        moved = self.place.observe(present, now)
        if moved is None:
            return False
        connection.move_token(self.token, before, moved)
        self.close(0.0)
        self._socket = connection.LearnerSocket(moved, self._keys)
        return True

    def disowns(self, reject: Reject) -> bool:
        """Return whether a refusal does not count, because it is not of this learner's own broker."""
        return reject.fatal and self.place.disowns(reject.code, reject.detail)

    def why_silent(self, deadline_s: float) -> HeadraceError:
        """Return the error for a broker that has not answered within `deadline_s`."""
        if self._socket is None:
            return UnreachableError("broker", "its rendezvous, which names no address", deadline_s)
        return self._socket.why_silent(deadline_s)

    def close(self, deadline_s: float = 0.5) -> None:
        """Close the socket; messages already sent have `deadline_s` to leave."""
        if self._socket is not None:
            self._socket.close(deadline_s)


def await_message(links: Sequence[BrokerLink], wait_s: float) -> None:
    """Wait until a message has arrived from one of these brokers, at most `wait_s`."""
    poller = zmq.Poller()
    for link in links:
        link.watch(poller)
    poller.poll(math.ceil(wait_s * 1000))
