"""Authentication of peers at the broker's ports: it answers ZAP requests, and counts the refused connections.

By ZAP (ZeroMQ RFC 27) libzmq asks whether a peer may connect. For each new CURVE connection its I/O thread sends a
request to a socket at a well-known name in the same context, and waits for the answer. The broker's own thread answers
between two turns of its loop. So a handshake may take one turn longer, and there is no thread to stop at the end.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Container, Iterator

import zmq
from zmq.utils import z85

from headrace.schemas import sockets
from headrace.schemas.handshakes import OTHER_MECHANISM, PROTOCOL, SERVER_EVENTS, WRONG_BROKER_KEY, read_event
from headrace.schemas.keys import ADMITTED, BrokerKeys

log = logging.getLogger(__name__)

Socket = zmq.Socket[bytes]

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_BURST = 256


class ZapAuthenticator:
    """Authenticates the peers of one broker, with or without keys. Only the thread that owns the sockets may use it.

    Create it before the first socket binds: from then on libzmq may ask. The context's end closes it.
    """

    def __init__(self, context: zmq.Context[Socket], keys: BrokerKeys | None) -> None:
        self.refused: Counter[tuple[str, str]] = Counter()
        """Number of refused connections, by (port, reason)."""
        self._keys = keys
        self._monitors: dict[Socket, str] = {}
        self._zap: Socket | None = None
        if keys is not None:
            self._zap = context.socket(zmq.REP)
            self._zap.linger = 0
            self._zap.bind(_ZAP_ENDPOINT)

    def guard(self, socket: Socket, port: str) -> None:
        """Admit at this socket, which is not yet bound, only peers whose role may connect to `port`."""
        if self._keys is not None:
            for name, value in self._keys.options(port).items():
                socket.setsockopt(getattr(zmq, name), value)
        self._monitors[socket.get_monitor_socket(SERVER_EVENTS)] = port

    @property
    def sockets(self) -> list[Socket]:
        """Return the sockets to poll, and to pass to `handle_ready` when they are readable."""
        return [*self._monitors, *([self._zap] if self._zap is not None else [])]

    def handle_ready(self, ready: Container[Socket]) -> None:
        """Answer ZAP requests and note failed handshakes on the sockets in `ready`. Does not block."""
        if self._zap is not None and self._zap in ready:
            for request in _received(self._zap):
                self._zap.send_multipart(self._judge(*request))
        for monitor, port in self._monitors.items():
            if monitor in ready:
                for frames in _received(monitor):
                    self._note_failure(port, *read_event(frames))

    def _judge(
        self, version: bytes, request: bytes, domain: bytes, address: bytes, _: bytes, mechanism: bytes, key: bytes
    ) -> list[bytes]:
        """Answer one request. 400 tells the client that the refusal is final, and it does not connect again."""
        assert self._keys is not None
        port, public = domain.decode(), z85.encode(key) if mechanism == b"CURVE" else b""
        role = self._keys.roles.get(public, "")
        if role in ADMITTED[port]:
            return [version, request, b"200", b"OK", role.encode(), b""]
        why = f"a {role} key" if role else "an unknown key"
        self._refuse(port, why, f"{public[:8].decode()}... from {address.decode()}")
        return [version, request, b"400", b"not for this port" if role else b"unknown key", b"", b""]

    def _note_failure(self, port: str, event: int, value: int) -> None:
        """Count a handshake that failed before any key was shown.

        Chance decides which side notices the mismatch first.
        """
        if event == PROTOCOL and value == WRONG_BROKER_KEY:
            self._refuse(port, "a peer that expects another broker's key", "")
        elif event == PROTOCOL and value != OTHER_MECHANISM:
            self._refuse(port, "a peer that speaks another protocol", hex(value))
        elif self._keys is not None:
            self._refuse(port, "a peer that showed no key", "")
        elif event == PROTOCOL:
            self._refuse(port, "a peer with keys, at a broker without", "")
        else:
            self._refuse(port, "a peer that broke off, as a peer with keys does at a broker without", "")

    def _refuse(self, port: str, why: str, seen: str) -> None:
        self.refused[port, why] += 1
        count = self.refused[port, why]
        if count & (count - 1) == 0:  # the first, second, fourth, ...: some peers try for ever
            detail = f" ({seen})" if seen else ""
            log.warning("refused at the %s port: %s%s, %d so far", port, why, detail, count)


def _received(socket: Socket) -> Iterator[list[bytes]]:
    """Yield waiting messages, a burst at most."""
    for _ in range(_BURST):
        try:
            yield socket.recv_multipart(sockets.DONTWAIT)
        except zmq.Again:
            return
