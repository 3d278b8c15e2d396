"""Facts about the connection at a descriptor, which the kernel knows and libzmq does not tell.

libzmq owns the descriptors. It may close one at any time, and the kernel then gives its number to another connection.
"""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from typing import Protocol

_BUFFER_BYTES = 8 << 20
_BYTES = struct.Struct("=Q")
_RECEIVED_AT = 128
"""The place of tcpi_bytes_received in Linux's `struct tcp_info`."""
_RESET = struct.pack("ii", 1, 0)
"""The value of SO_LINGER with which libzmq's close resets the connection, so that no buffer outlives it."""
_PEER, _PROCESS = struct.Struct("3i"), "process "
"""Linux's `struct ucred` (pid, uid, gid), and the beginning of the name of a Unix socket's peer."""
_SRCFD = 2
"""libzmq's property of a frame."""
_FAMILY = socket.AF_INET6
"""Has room for the addresses of both families. The kernel knows the descriptor's own."""


class Frame(Protocol):
    """A frame that was received without a copy."""

    def get(self, option: int) -> int | bytes | str:
        """Return a property of the frame's message. Raises OSError, in pyzmq's form, if there is none."""


def source_of(frame: Frame) -> int:
    """Return the descriptor of the connection on which a frame came; -1 for a peer of ZMTP 2 and before.

    Headrace's own peers speak ZMTP 3. Bytes from an older peer count as held, so its connection ends after a while.
    """
    try:
        return int(frame.get(_SRCFD))
    except Exception:  # noqa: BLE001  pyzmq's ZMQError, which schemas do not import
        return -1


class _Borrowed:
    """A socket object for a descriptor that libzmq owns, for the time of a `with`. Its end does not close it."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(_FAMILY, socket.SOCK_STREAM, 0, fileno=fd)

    def __enter__(self) -> socket.socket:
        return self._socket

    def __exit__(self, *_: object) -> None:
        self._socket.detach()


def peer_of(fd: int) -> tuple[str, int] | None:
    """Return the address of the peer at a descriptor; None if it is no connection (any more), or cannot be known."""
    try:
        with _Borrowed(fd) as borrowed:
            return _address(borrowed)
    except (OSError, AttributeError, ValueError):  # ValueError: -1, of `source_of`
        return None


def _address(found: socket.socket) -> tuple[str, int]:
    """Return (host, port); of a Unix socket's peer, which has no address, ("process PID", inode of this end)."""
    peer = found.getpeername()
    if isinstance(peer, tuple):
        return str(peer[0]), int(peer[1])
    pid, _, _ = _PEER.unpack(found.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return f"{_PROCESS}{pid}", os.fstat(found.fileno()).st_ino


def peer_in_words(peer: tuple[str, int]) -> str:
    """Return a result of `peer_of` as the log names it."""
    host, port = peer
    return host if host.startswith(_PROCESS) else f"{host}:{port}"


def bytes_received(fd: int) -> int:
    """Return how many bytes have come at a descriptor in all; 0 where the system does not tell."""
    size = _RECEIVED_AT + _BYTES.size
    try:
        with _Borrowed(fd) as borrowed:
            told = borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
    except (OSError, AttributeError, ValueError):  # ValueError: -1, of `source_of`
        return 0
    return int(_BYTES.unpack_from(told, _RECEIVED_AT)[0]) if len(told) >= size else 0


def shut_down(fd: int, peer: tuple[str, int]) -> bool:
    """Shut down the connection with `peer` at `fd`. Do nothing and return False if another one has the descriptor.

    Work on a copy of the descriptor, since libzmq may close its own between the check and the shutdown.
    """
    try:
        copy = socket.socket(_FAMILY, socket.SOCK_STREAM, 0, fileno=os.dup(fd))
    except OSError:
        return False
    with copy:
        try:
            if _address(copy) != peer:
                return False
            copy.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            copy.shutdown(socket.SHUT_RDWR)
        except OSError:
            return False
        # What has come and libzmq has not read: it would still read that, and make messages of it.
        with suppress(OSError):  # a peer that sends on meanwhile is answered by a reset, which ends this connection
            while copy.recv(_BUFFER_BYTES, socket.MSG_DONTWAIT | socket.MSG_TRUNC):
                pass
    return True
