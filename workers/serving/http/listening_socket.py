"""The socket where HTTP clients come in."""

from __future__ import annotations

import socket


def listen(host: str, port: int) -> socket.socket:
    """A bound one, whose connections send what they have at once; raises OSError.

    They inherit that, but only if it is said before anybody can connect: a client may do so as soon as there is a port.
    asyncio would see to it where the protocol of a socket is spelt out; without it each answer to a client that keeps
    its connection waits 40 ms for the client's kernel.
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
