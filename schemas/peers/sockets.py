"""Socket options that every side sets, by their ZeroMQ names. Data only: schemas do not import zmq.

libzmq's defaults hang at exit (LINGER -1), never notice a dead peer (HEARTBEAT_IVL 0), and give a handshake half a
minute. All options must be set before bind or connect, or they have no effect.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Any

MORE, DONTWAIT = 2, 1
"""Flags of libzmq as plain integers: or-ing pyzmq's enums for every frame costs as much as sending a small one."""
_EVENTS, _POLLIN = 15, 1

COPY_BELOW_BYTES = 1 << 20
"""A worker copies frames below this size when it sends them. Without a copy pyzmq learns of each one's end in a thread
of its own, which takes turns of the interpreter lock from the thread that samples. The copy of a small batch is
cheaper.
"""

MOST_WAITING = 1 << 16
"""Messages that wait for a peer that does not read, where each is repeated in time: acknowledgements, orders, answers.
Later ones are dropped.
"""

COMMON: dict[str, int] = {
    "LINGER": 0,
    "HEARTBEAT_IVL": 5_000,
    "HEARTBEAT_TIMEOUT": 8_000,
    "HANDSHAKE_IVL": 5_000,
    "RECONNECT_IVL": 50,
    "RECONNECT_IVL_MAX": 1_000,
}
"""Times in milliseconds. ZMTP heartbeats tell only that the peer's I/O thread lives; the protocol has its own."""

_SERVER = COMMON | {"HEARTBEAT_IVL": 20_000, "BACKLOG": 4096}
"""Each connection has a heartbeat and its answer in each direction, which are most of what an idle broker of a thousand
workers pays for. It needs them only to close what a machine without power left open: leases end its sessions.

BACKLOG: connections that may wait to be accepted, since all workers connect at once to a broker that starts again. The
kernel drops those beyond it, and a peer tries again after a second. Linux allows `net.core.somaxconn` at most.
"""

DEALER: dict[str, int] = COMMON | {"SNDHWM": 0, "RCVHWM": 0, "IMMEDIATE": 1, "IPV6": 1}
"""Unbounded at the socket, since windows and credit bound what is sent. IMMEDIATE: without a connection a send fails at
once, and does not fill a queue of old messages for a later peer. IPV6 allows both kinds of address. A server sets it
for IPv6 hosts only, or IPv4 endpoints would be written in IPv6 form.
"""

ROUTER: dict[str, int] = _SERVER | {"SNDHWM": 0, "RCVHWM": 0, "ROUTER_MANDATORY": 1}
"""MANDATORY: a message for a peer that has gone raises an error and is not dropped silently.

RCVHWM 0: at a bound libzmq 4.3.5 stops to read from a peer, and its connection may be reset meanwhile. A ping that is
then due, or among what the peer has sent, ends the process ("Assertion failed: !_io_error").
"""

_KEEPALIVE: dict[str, int] = {
    "HEARTBEAT_IVL": 0,
    "TCP_KEEPALIVE": 1,
    "TCP_KEEPALIVE_IDLE": 20,
    "TCP_KEEPALIVE_INTVL": 5,
    "TCP_KEEPALIVE_CNT": 3,
}
"""The kernel looks for a dead peer (times in seconds). A SUB stops to read at its RCVHWM, where a ping may end its
process.
"""

XPUB: dict[str, int] = _SERVER | _KEEPALIVE | {"SNDHWM": 4, "RCVHWM": 0, "XPUB_VERBOSE": 1}
"""A slow subscriber misses versions and delays no other. Heartbeats tell it of the newest version, which it pulls.
VERBOSE: the broker learns of every new subscriber and sends the last version again.
"""

SUB: dict[str, int] = COMMON | _KEEPALIVE | {"RCVHWM": 4, "IPV6": 1}
"""Few versions wait: each is applied between two steps or replaced by a newer one. Where its connection is lost without
a sign, a worker learns of new versions by its session, and pulls them.
"""


def send(socket: Any, frames: Sequence[Any]) -> None:
    """Send one message without waiting, its large frames without a copy. Raises pyzmq's errors.

    Frames that were received go out again without a copy.
    """
    for frame in frames[:-1]:
        socket.send(frame, MORE | DONTWAIT, copy=False)
    socket.send(frames[-1], DONTWAIT, copy=False)


def reaches(router: Any, message: Sequence[bytes]) -> bool:
    """Send one message by a ROUTER with ROUTER_MANDATORY. Return False if its peer has gone.

    Raises pyzmq's other errors.
    """
    try:
        router.send_multipart(message, DONTWAIT)
    except Exception as error:
        if getattr(error, "errno", 0) != errno.EHOSTUNREACH:
            raise
        return False
    return True


def receive(dealer: Any) -> list[memoryview] | None:
    """Return the frames of a DEALER's next message, or a SUB's; None if there is none, or if its connection ended.

    They are read-only views that keep the message's memory. Raises pyzmq's errors, `zmq.Again` among them where the
    connection ends in the midst of the message.
    """
    if not has_message(dealer):
        return None
    frame = dealer.recv(DONTWAIT, copy=False)
    frames = [frame.buffer]
    while frame.more:
        frame = dealer.recv(DONTWAIT, copy=False)
        frames.append(frame.buffer)
    return frames


def has_message(dealer: Any) -> bool:
    """Return whether a message waits in a DEALER with IMMEDIATE. Ask before each message that is read.

    When a connection ends, libzmq drops what such a socket has received and nobody has read. It notes the end when it
    is asked for events, and at each hundredth frame that is read. Noted in the midst of a message, the end aborts the
    process ("Assertion failed: !_more").
    """
    return bool(dealer.get(_EVENTS) & _POLLIN)
