"""A probe that tells whether the fleet's own Redis server hangs or is only slow, when the server is silent."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import urlsplit

PINGS = 3
PING_EVERY_S = 5.0
"""Seconds between two PINGs. A server that answers none of `PINGS` hangs."""

_CONNECT_S = 0.1
_LARGEST_ANSWER = 4096


class RedisProbe:
    """Sends PINGs to the server at `url` while it is silent, each on a connection of its own.

    All connections stay open until the server answers one PING, so that a late answer still counts. A server that only
    answers that it is busy with a script counts as silent.

    - silent_s: returns the seconds since the server last answered anything; below `PING_EVERY_S` no PING is sent.
    """

    def __init__(self, url: str, silent_s: Callable[[], float], ping_every_s: float = PING_EVERY_S) -> None:
        parts = urlsplit(url)
        self._port, password = parts.port or 0, parts.password or ""
        self._request = f"AUTH {password}\r\nPING\r\n".encode()
        self._silent_s = silent_s
        self._ping_every_s = ping_every_s
        self._pings: list[_Ping] = []
        self._due = 0.0

    def unanswered_s(self, now: float) -> float:
        """Return for how long the server has answered none of `PINGS` PINGs; 0.0 while it does not count as hung."""
        if self._silent_s() < self._ping_every_s or any(ping.is_answered() for ping in self._pings):
            self.forget()
            return 0.0
        if now < self._due:
            return 0.0
        if len(self._pings) >= PINGS:
            return now - self._pings[0].sent
        self._due = now + self._ping_every_s
        try:
            self._pings.append(_Ping(self._port, self._request, now))
        except OSError:  # the server does not listen yet, or has just ended; or no descriptor is left
            self.forget()
        return 0.0

    def forget(self) -> None:
        """Close all connections, and start over with the first PING."""
        for ping in self._pings:
            ping.close()
        self._pings, self._due = [], 0.0


class _Ping:
    """One PING and what came back so far. A server that accepts no connection in time answers nothing."""

    def __init__(self, port: int, request: bytes, now: float) -> None:
        self.sent = now
        self._answer = b""
        self._connection: socket.socket | None = None
        with suppress(TimeoutError):
            self._connection = socket.create_connection(("127.0.0.1", port), _CONNECT_S)
            self._connection.setblocking(False)
            self._connection.send(request)

    def is_answered(self) -> bool:
        """Return whether the server has answered. An error is an answer too, unless it says -BUSY (a script runs)."""
        if self._connection is None:
            return False
        try:
            came = self._connection.recv(_LARGEST_ANSWER)
        except BlockingIOError:
            return False
        except OSError:
            return True  # the server closed the connection, so it does not hang
        self._answer = (self._answer + came)[-_LARGEST_ANSWER:]
        is_whole = not came or self._answer.count(b"\n") > 1
        return is_whole and b"-BUSY" not in self._answer

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
