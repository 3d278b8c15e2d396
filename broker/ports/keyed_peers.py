"""The key of each connection that has introduced itself, and the end of connections whose key is revoked."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import zmq

from headrace.broker.batches.broker_observer import BrokerObserver
from headrace.broker.batches.source import Peer
from headrace.broker.ports.sockets import BrokerSockets, Socket
from headrace.broker.sessions.core import BrokerCore
from headrace.broker.sessions.hello_rights import revocation
from headrace.schemas.accounts.redis_keys import GONE_KEY
from headrace.schemas.credentials.key_files import PeerKey
from headrace.schemas.credentials.keys import BrokerKeys
from headrace.schemas.peers.descriptors import peer_in_words, peer_of, shut_down, source_of

log = logging.getLogger(__name__)

END_AFTER_S = 1.0
"""Seconds between the last message to a peer whose key is revoked and the end of its connection."""


@dataclass(frozen=True, slots=True)
class _Connection:
    peer: Peer
    public: bytes
    fd: int
    address: tuple[str, int] | None

    def end(self) -> None:
        """Shut the connection down, if it still is the one at its descriptor."""
        if self.address is not None and shut_down(self.fd, self.address):
            log.warning("closed a connection of %s: its key is revoked", peer_in_words(self.address))


class KeyedPeers(BrokerObserver):
    """The connections of a broker with keys; without keys none. For the thread that owns its sockets."""

    def __init__(self, core: BrokerCore, sockets: BrokerSockets, keys: BrokerKeys | None) -> None:
        self._core = core
        self._sockets = sockets
        self.known = keys.known if keys is not None else None
        self._changes = self.known.changes if self.known is not None else 0
        self._connections: dict[tuple[Socket, int], _Connection] = {}
        """By port and descriptor, so there are at most as many as the port ever had at the same time."""
        self._ending: dict[_Connection, float] = {}
        """The time at which each connection ends whose key is revoked."""

    def introduce(self, socket: Socket, peer: Peer, frame: zmq.Frame) -> PeerKey | None:
        """Note the key of the connection on which a frame came, and return the key's present state.

        `peer` is b"" for a peer that only listens, such as a subscriber.
        """
        key, fd = self._sockets.auth.key_of(frame), source_of(frame)
        if key is not None:
            found = _Connection(peer, key.public, fd, peer_of(fd))
            if key.revoked:
                self._end_soon(found)
            else:
                self._connections[socket, fd] = found
        return key

    def tick(self, now: float) -> None:
        """Look at the folder of keys when that is due. Expel the peers whose key is revoked since the last call.

        Their connections end `END_AFTER_S` later, so that a last message reaches them.
        """
        if self.known is None:
            return
        self.known.look()
        for connection in [connection for connection, ends_at in self._ending.items() if now >= ends_at]:
            del self._ending[connection]
            connection.end()
        if self._changes == self.known.changes:
            return
        self._changes = self.known.changes
        for place, connection in list(self._connections.items()):
            key = self.known.find(connection.public)
            if key is None or key.revoked:
                del self._connections[place]
                self._end_soon(connection)
                if connection.peer:
                    key = key or PeerKey("", "", connection.public, revoked=True)
                    self._core.revoked[key.name or GONE_KEY] += 1
                    self._core.expel(connection.peer, *revocation(key))

    def _end_soon(self, connection: _Connection) -> None:
        """End a connection. A peer that only listens is cut immediately: it takes no message, and would get weights."""
        if connection.peer:
            self._ending.setdefault(connection, time.monotonic() + END_AFTER_S)
        else:
            connection.end()
