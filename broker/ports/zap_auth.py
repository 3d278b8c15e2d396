"""Authentication of peers at the broker's ports: it answers ZAP requests, and counts the refused connections.

The broker's own thread answers between two turns of its loop. So a handshake may take one turn longer, and there is no
thread to stop at the end.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from threading import Lock

import zmq

from headrace.schemas.credentials.key_files import PeerKey
from headrace.schemas.credentials.keys import BrokerKeys
from headrace.schemas.peers import sockets, zap
from headrace.schemas.peers.handshakes import OTHER_MECHANISM, PROTOCOL, WRONG_BROKER_KEY

log = logging.getLogger(__name__)

Socket = zmq.Socket[bytes]

_MOST_REQUESTS = 256


class ZapAuthenticator:
    """Authenticates the peers of one broker by keys, or not at all. Only the sockets' thread may use it.

    Create it before the first socket binds: from then on libzmq may send requests. It ends with `own`.
    """

    def __init__(self, own: sockets.OwnSockets, keys: BrokerKeys | None) -> None:
        self.refused: Counter[tuple[str, str]] = Counter()
        """Number of refused connections, by (port, reason)."""
        self._refused_lock = Lock()
        """Guards `refused`: the watches of the ports count there too, each in its own thread."""
        self.keys = keys
        self._zap: Socket | None = None
        if keys is not None:
            self._zap = own.open(zmq.ROUTER, {"LINGER": 0})
            self._zap.bind(zap.ENDPOINT)

    def guard(self, socket: Socket, port: str) -> Callable[[int, int], None]:
        """Admit at this socket, which is not yet bound, only peers whose role may connect to `port`.

        Return a callback that counts a failed handshake by its (event, value). Any thread may call the callback.
        """
        if self.keys is not None:
            for name, value in self.keys.options(port).items():
                socket.setsockopt(getattr(zmq, name), value)
        return partial(self._note_failure, port)

    @property
    def sockets(self) -> list[Socket]:
        """Return the sockets to poll. When they are readable, call `judge`."""
        return [self._zap] if self._zap is not None else []

    def judge(self) -> None:
        """Take requests, and answer each. Does not block."""
        assert self._zap is not None
        assert self.keys is not None
        for _ in range(_MOST_REQUESTS):
            try:
                route, empty, *request = self._zap.recv_multipart(sockets.DONTWAIT)
            except zmq.Again:
                return
            verdict = zap.judge(request, self.keys)
            if verdict.why:
                self._refuse(verdict.port, verdict.why, verdict.seen)
            # The answer sets the user id that `key_of` reads from messages.
            self._zap.send_multipart([route, empty, *verdict.frames], sockets.DONTWAIT)

    def key_of(self, frame: zmq.Frame) -> PeerKey | None:
        """Return the key of the connection on which a frame came, as it stands now; None without keys.

        A call costs microseconds, so make it for each HELLO, not for each message.
        """
        if self.keys is None:
            return None
        try:
            public = str(frame.get("User-Id")).encode()
        except zmq.ZMQError:  # a message of no connection, or of one that showed no key
            public = b""
        return self.keys.known.find(public) or PeerKey("", "", public, revoked=True)

    def _note_failure(self, port: str, event: int, value: int) -> None:
        """Count a handshake that failed before any key was shown.

        Chance decides which side notices the mismatch first.
        """
        if event == PROTOCOL and value == WRONG_BROKER_KEY:
            self._refuse(port, "a peer that expects another broker's key", "")
        elif event == PROTOCOL and value != OTHER_MECHANISM:
            self._refuse(port, "a peer that speaks another protocol", hex(value))
        elif self.keys is not None:
            self._refuse(port, "a peer that showed no key", "")
        elif event == PROTOCOL:
            self._refuse(port, "a peer with keys, at a broker without", "")
        else:
            self._refuse(port, "a peer that broke off, as a peer with keys does at a broker without", "")

    def _refuse(self, port: str, why: str, seen: str) -> None:
        with self._refused_lock:
            self.refused[port, why] += 1
            count = self.refused[port, why]
        if count & (count - 1) == 0:  # the first, second, fourth, ...: some peers try for ever
            detail = f" ({seen})" if seen else ""
            log.warning("refused at the %s port: %s%s, %d so far", port, why, detail, count)
