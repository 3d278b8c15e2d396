"""A bell and a socket between a driver and one process of envs.

    to the process     an eventfd, to which RING (look at your commands) or STOP is added
    from the process   length of what follows: uint32, little-endian; then JSON, or nothing when there is nothing to add

All that is large is in shared memory. What an env says of itself (infos, errors, spaces) is JSON.

The bell is no socket, since a socket's wake-up tells the scheduler that the sender is about to sleep: it then puts the
process that wakes onto the driver's core, though the driver has others to wake and another core is idle.
"""

from __future__ import annotations

import os
import socket
import struct
from typing import Any

import orjson

RING, STOP = 1, 1 << 32

_LENGTH = struct.Struct("<I")
_READ = 1 << 16
_NOTHING = _LENGTH.pack(0)


class DriverEnd:
    """The driver's end. Never blocks."""

    def __init__(self, sock: socket.socket, bell: int) -> None:
        sock.setblocking(False)
        self._sock, self._bell = sock, bell
        self._buffer = bytearray()
        self.is_over = False
        """The process has ended, or closed its end, and everything was read."""

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, signal: int) -> None:
        """RING or STOP. A process that has ended is no error: its end is noticed by its pidfd."""
        os.eventfd_write(self._bell, signal)

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
        os.close(self._bell)


class ProcessEnd:
    """The end of the process of envs. Blocks."""

    def __init__(self, sock: socket.socket, bell: int) -> None:
        self._sock, self._bell = sock, bell

    def wait(self) -> bool:
        """Whether there are commands; False is the end that was asked for. A driver that is gone ends it otherwise."""
        return os.eventfd_read(self._bell) < STOP

    def answer(self, what: dict[str, Any]) -> None:
        """Say that all commands were obeyed, and what else there is to say."""
        if not what:
            self._sock.sendall(_NOTHING)
            return
        body = orjson.dumps(what)
        self._sock.sendall(_LENGTH.pack(len(body)) + body)
