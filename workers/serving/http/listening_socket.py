"""The listening socket for HTTP clients."""

from __future__ import annotations

import socket


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at `host` and `port`. Raises OSError.

    Its connections send small answers at once (TCP_NODELAY). They inherit the option only if it is set before a client
    can connect, and asyncio does not set it on a socket that it did not create. Without it, each answer on a connection
    that stays open waits 40 ms for the kernel of the client.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if family == socket.AF_INET6:
            found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        found.bind((host, port))
        found.listen()
    except BaseException:
        found.close()
        raise
    return found
