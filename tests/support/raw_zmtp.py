"""A peer that speaks ZMTP 3.0 by hand, over TCP or a Unix socket, so that it can do what libzmq never does."""

from __future__ import annotations

import re
import socket
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

from support.waiting import TIMEOUT_S

_GREETING_BYTES = 64
MORE = 1
PING = b"\4\7\4PING\0\0"
"""A command of ZMTP: it asks for a PONG."""


def command(name: bytes, content: bytes) -> bytes:
    """One command of ZMTP."""
    return bytes([4, 1 + len(name) + len(content), len(name)]) + name + content


def frame(payload: bytes, *, more: bool) -> bytes:
    """One frame of a message."""
    if len(payload) < 256:
        return bytes([MORE if more else 0, len(payload)]) + payload
    return head(len(payload), more=more) + payload


def head(nbytes: int, *, more: bool) -> bytes:
    """The beginning of a frame that announces `nbytes`."""
    return struct.pack(">BQ", (MORE if more else 0) | 2, nbytes)


def on_the_wire(frames: Iterable[Any]) -> bytes:
    """The bytes of a whole message, as a peer without libzmq sends it."""
    *first, last = (bytes(part) for part in frames)
    return b"".join(frame(part, more=True) for part in first) + frame(last, more=False)


def reach(endpoint: str) -> socket.socket:
    """Connect to `endpoint`, and send nothing."""
    if endpoint.startswith("ipc://"):
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(TIMEOUT_S)
        sock.connect(endpoint.removeprefix("ipc://"))
        return sock
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=TIMEOUT_S)


def _greeting(mechanism: bytes) -> bytes:
    return b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)


def knock(endpoint: str, socket_type: bytes = b"DEALER") -> socket.socket:
    """Connect to `endpoint`, and send all of a handshake. The server may admit this peer now."""
    sock = reach(endpoint)
    ready = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", len(socket_type)) + socket_type
    sock.sendall(_greeting(b"NULL") + bytes([4, len(ready)]) + ready)
    return sock


class RawZmtp:
    """One connection to a ROUTER or XPUB at `endpoint`, after its handshake. `sock` is for what comes next.

    mechanism: with CURVE, the connection is as it is after the greetings, and before the first command.
    """

    def __init__(self, endpoint: str, socket_type: bytes = b"DEALER", mechanism: bytes = b"NULL") -> None:
        if mechanism == b"CURVE":
            self.sock = reach(endpoint)
            self.sock.sendall(_greeting(mechanism))
            self._read(_GREETING_BYTES)
            return
        self.sock = knock(endpoint, socket_type)
        self._read(_GREETING_BYTES)
        self._read(self._read(2)[1])  # its READY: the server has admitted this peer. What came before would end it

    def _read(self, nbytes: int) -> bytes:
        data = b""
        while len(data) < nbytes:
            got = self.sock.recv(nbytes - len(data))
            if not got:
                self.sock.close()
                raise AssertionError("the server ends the handshake")
            data += got
        return data

    def send(self, data: bytes) -> bool:
        """Send these bytes. Return False if the server has ended the connection."""
        try:
            self.sock.sendall(data)
        except OSError:
            return False
        return True

    def is_cut(self) -> bool:
        """Return whether the server has ended the connection. Reads what it has sent."""
        self.sock.setblocking(False)
        try:
            while self.sock.recv(1 << 16):
                pass
        except BlockingIOError:
            return False
        except OSError:
            return True
        else:
            return True
        finally:
            self.sock.settimeout(TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()


def memory_of(pid: int, name: str = "VmRSS") -> int:
    """Bytes of memory of a process: resident now, or VmHWM for the most so far."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10
