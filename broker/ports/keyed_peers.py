"""The key of each connection that has introduced itself, and the end of connections whose key is revoked."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import zmq

from headrace.broker.batches.source import Peer
from headrace.broker.ports.zap_auth import Socket, ZapAuthenticator
from headrace.schemas.credentials.key_files import PeerKey
from headrace.schemas.credentials.keys import BrokerKeys
from headrace.schemas.peers.descriptors import peer_of, source_of
from headrace.schemas.peers.port_watch import PortWatch

END_AFTER_S = 1.0
"""Seconds between the last message to a peer whose key is revoked and the end of its connection."""


@dataclass(frozen=True, slots=True)
class _Connection:
    peer: Peer
    public: bytes
    watch: PortWatch
    fd: int
    address: tuple[str, int] | None

    def end(self) -> None:
        if self.address is not None:
            self.watch.end(self.fd, self.address, "its key is revoked")


class KeyedPeers:
    """The connections of a broker with keys. For the thread that owns its sockets."""

    def __init__(self, auth: ZapAuthenticator, keys: BrokerKeys, watches: Mapping[Socket, PortWatch]) -> None:
        self._auth = auth
        self._known = keys.known
        self._watches = watches
        self._changes = self._known.changes
        self._connections: dict[tuple[Socket, int], _Connection] = {}
        """By port and descriptor, so there are at most as many as the port ever had at the same time."""
        self._ending: deque[tuple[float, _Connection]] = deque()

    def introduce(self, socket: Socket, peer: Peer, frame: zmq.Frame) -> PeerKey | None:
        """Note the key of the connection on which a frame came, and return the key's present state.

        `peer` is b"" for a peer that only listens, such as a subscriber.
        """
        key, fd = self._auth.key_of(frame), source_of(frame)
        if key is not None:
            found = _Connection(peer, key.public, self._watches[socket], fd, peer_of(fd))
            self._connections[socket, fd] = found
            if key.revoked:
                self._end_soon(found)
        return key

    def take_revoked(self) -> list[tuple[Peer, PeerKey]]:
        """Look at the folder of keys when that is due. Return the peers whose key is revoked since the last call.

        Their connections end `END_AFTER_S` later, so that a last message reaches them. Peers that only listen are left
        out.
        """
        self._known.look()
        now = time.monotonic()
        while self._ending and now >= self._ending[0][0]:
            self._ending.popleft()[1].end()
        if self._changes == self._known.changes:
            return []
        self._changes = self._known.changes
        gone = []
        for place, connection in list(self._connections.items()):
            key = self._known.find(connection.public)
            if key is None or key.revoked:
                del self._connections[place]
                self._end_soon(connection)
                if connection.peer:
                    gone.append((connection.peer, key or PeerKey("", "", connection.public, revoked=True)))
        return gone

    def _end_soon(self, connection: _Connection) -> None:
        """End a connection. A peer that only listens is cut immediately: it takes no message, and would get weights."""
        if connection.peer:
            self._ending.append((time.monotonic() + END_AFTER_S, connection))
        else:
            connection.end()
