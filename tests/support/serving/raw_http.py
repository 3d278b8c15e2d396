"""HTTP by hand, on a socket of the test's own: whatever bytes it likes, and what is said to them."""

from __future__ import annotations

import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

import orjson

DEADLINE_S = 20.0


@dataclass(frozen=True)
class Told:
    status: int
    headers: dict[str, str]
    body: Any


class RawHttp:
    """A connection to `url`. Whatever takes longer than a good while is a `TimeoutError`."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        self.socket = socket.create_connection((str(address.hostname), address.port or 80), timeout=DEADLINE_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.read = b""

    def say(self, data: bytes) -> None:
        """Send it, even if nobody reads it any more."""
        with suppress(ConnectionError):
            self.socket.sendall(data)

    def said_all(self) -> None:
        """Send nothing any more."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def hear(self) -> Told:
        """The next answer; a `ConnectionError` when the server has ended the connection."""
        head = self._until(b"\r\n\r\n").decode("latin-1")
        line, *rows = head.split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (row.partition(":") for row in rows)}
        status, size = int(line.split(" ")[1]), int(headers.get("content-length", "0"))
        while len(self.read) < size:
            self.more()
        body, self.read = self.read[:size], self.read[size:]
        assert headers["content-type"] == "application/json", head
        return Told(status, headers, orjson.loads(body))

    def hear_refusal(self, status: int, error: str) -> str:
        """An error of the page's form, and the end of the connection; what it says."""
        told = self.hear()
        assert (told.status, set(told.body)) == (status, {"error", "message", "facts"}), told
        assert told.body["error"] == error
        assert told.headers["connection"] == "close"
        self.hear_end()
        return str(told.body["message"])

    def hear_end(self) -> None:
        """The server ends the connection, and has said nothing more."""
        with suppress(ConnectionError):
            while not self.read:
                self.more()
        assert not self.read, self.read

    def rest(self) -> bytes:
        """All that is said until the server ends the connection."""
        with suppress(ConnectionError):
            while True:
                self.more()
        rest, self.read = self.read, b""
        return rest

    def _until(self, mark: bytes) -> bytes:
        while mark not in self.read:
            self.more()
        found, self.read = self.read.split(mark, 1)
        return found

    def more(self) -> None:
        """Take what comes."""
        data = self.socket.recv(1 << 16)
        if not data:
            raise ConnectionError("the server has ended the connection")
        self.read += data

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def head(path: str, *more: str, token: str = "own") -> bytes:
    """That of a PUT."""
    lines = [f"PUT {path} HTTP/1.1", "Host: localhost", f"Headrace-Client: {token}", *more]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


def put(path: str, body: bytes = b"{}", *more: str, token: str = "own") -> bytes:
    """A sound request."""
    return head(path, f"Content-Length: {len(body)}", *more, token=token) + body


HEALTH = b"GET /v1/health HTTP/1.1\r\nHost: localhost\r\n\r\n"
