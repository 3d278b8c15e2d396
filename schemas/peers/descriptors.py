"""Facts about the connection at a descriptor, which the kernel knows and libzmq does not tell.

libzmq owns the descriptors. It may close one at any time, and the kernel then gives its number to another connection.
"""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from typing import Any

_RESET = struct.pack("ii", 1, 0)
"""The value of SO_LINGER with which libzmq's close resets the connection, so that no buffer outlives it."""
_PEER, _PROCESS = struct.Struct("3i"), "process "
"""Linux's `struct ucred` (pid, uid, gid), and the beginning of the name of a Unix socket's peer."""
_TCP_COUNTS = struct.Struct("=120x2Q")
"""The bytes that a peer has acknowledged, and those that came from it, in Linux's `struct tcp_info`."""
_SRCFD = 2
"""libzmq's property of a frame."""
_FAMILY = socket.AF_INET6
"""Has room for the addresses of both families. The kernel knows the descriptor's own."""


def source_of(frame: Any) -> int:
    """Return the descriptor of the connection on which a ZeroMQ frame came, which was received without a copy.

    -1 for a peer of ZMTP 2 and before. Headrace's own peers speak ZMTP 3.
    """
    try:
        return int(frame.get(_SRCFD))
    except Exception:  # noqa: BLE001  pyzmq's ZMQError, which schemas do not import
        return -1


def peer_of(fd: int) -> tuple[str, int] | None:
    """Return the address of the peer at a descriptor; None if it is no connection (any more), or cannot be known."""
    try:
        borrowed = socket.socket(_FAMILY, socket.SOCK_STREAM, 0, fileno=fd)
    except (OSError, ValueError):  # ValueError: -1, of `source_of`
        return None
    try:
        return _address(borrowed)
    except (OSError, AttributeError):
        return None
    finally:
        borrowed.detach()  # its end would close the descriptor


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


def byte_counts(fd: int, peer: tuple[str, int]) -> tuple[int, int] | None:
    """Return how many bytes `peer` has acknowledged over TCP, and sent; None if another one has the descriptor."""
    try:
        with socket.socket(_FAMILY, socket.SOCK_STREAM, 0, fileno=os.dup(fd)) as copy:
            counts = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_COUNTS.size)
            return _TCP_COUNTS.unpack(counts) if _address(copy) == peer else None
    except (OSError, struct.error):  # struct.error: an older kernel, which does not count
        return None


def shut_down(fd: int, peer: tuple[str, int]) -> bool:
    """Shut down the connection with `peer` at `fd`. Do nothing and return False if another one has the descriptor.

    Work on a copy of the descriptor, since libzmq may close its own between the check and the shutdown.
    """
    with suppress(OSError), socket.socket(_FAMILY, socket.SOCK_STREAM, 0, fileno=os.dup(fd)) as copy:
        if _address(copy) == peer:
            copy.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            copy.shutdown(socket.SHUT_RDWR)
            return True
    return False
