"""Frames over a socket between a driver and one process of envs.

    to the process     one byte: RING (look at your commands) or STOP
    from the process   length of what follows: uint32, little-endian; then JSON, or nothing when there is nothing to add

All that is large is in shared memory. What an env says of itself (infos, errors, spaces) is JSON.
"""

from __future__ import annotations

import socket
import struct
from typing import Any

import orjson

RING, STOP = b"r", b"s"

_LENGTH = struct.Struct("<I")
_READ = 1 << 16
_NOTHING = _LENGTH.pack(0)


class DriverEnd:
    """The driver's end. Never blocks."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._buffer = bytearray()
        self.is_over = False
        """The process has ended, or closed its end, and everything was read."""

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, signal: bytes) -> None:
        """Send one byte; one is under way at most, so there is always room. A process that has ended is no error."""
        try:
            self._sock.send(signal)
        except (BrokenPipeError, ConnectionResetError):
            return  # its end is noticed by its pidfd

    def receive(self) -> dict[str, Any] | None:
        """The answer, {} for an empty one; None while it is not complete: then ask again when there is more to read."""
        buffer = self._buffer
        try:
            part = self._sock.recv(_READ)
            self.is_over = not part
            buffer += part
        except BlockingIOError:
            pass
        except ConnectionResetError:
            self.is_over = True
        if len(buffer) < _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack_from(buffer)
        if len(buffer) < _LENGTH.size + size:
            return None
        body = bytes(buffer[_LENGTH.size : _LENGTH.size + size])
        del buffer[: _LENGTH.size + size]
        answer: dict[str, Any] = orjson.loads(body) if body else {}
        return answer

    def close(self) -> None:
        self._sock.close()


class ProcessEnd:
    """The end of the process of envs. Blocks."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def wait(self) -> bool:
        """Whether there are commands; False is the end, asked for or because the driver is gone."""
        return self._sock.recv(1) == RING

    def answer(self, what: dict[str, Any]) -> None:
        """Say that all commands were obeyed, and what else there is to say."""
        if not what:
            self._sock.sendall(_NOTHING)
            return
        body = orjson.dumps(what)
        self._sock.sendall(_LENGTH.pack(len(body)) + body)
