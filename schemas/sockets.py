"""Socket options that every side sets, by their ZeroMQ names. Data only: schemas do not import zmq.

libzmq's defaults hang at exit (LINGER -1), never notice a dead peer (HEARTBEAT_IVL 0), and hand a handshake half a
minute. All must be set before bind or connect, or they have no effect.
"""

from __future__ import annotations

MORE, DONTWAIT = 2, 1
"""Flags of libzmq as plain integers: or-ing pyzmq's enums for every frame costs as much as sending a small one."""

COPY_BELOW_BYTES = 1 << 20
"""A worker's frames below this are copied when sent. Without a copy pyzmq hears of each one's end in a thread of its
own, which takes turns of the interpreter lock from the one that samples; the copy of a small batch is cheaper."""

COMMON: dict[str, int] = {
    "LINGER": 0,
    "HEARTBEAT_IVL": 2_000,
    "HEARTBEAT_TIMEOUT": 8_000,
    "HANDSHAKE_IVL": 5_000,
    "RECONNECT_IVL": 50,
    "RECONNECT_IVL_MAX": 1_000,
}
"""Times in milliseconds. ZMTP heartbeats tell only that the peer's I/O thread lives; the protocol has its own."""

DEALER: dict[str, int] = COMMON | {"SNDHWM": 0, "RCVHWM": 0, "IMMEDIATE": 1, "IPV6": 1}
"""Unbounded at the socket, since windows and credit bound what is sent. IMMEDIATE: without a connection a send fails
at once, rather than filling a queue that would speak of the past to whoever answers later. IPV6 allows both kinds of
address; who binds sets it for IPv6 hosts only, or IPv4 endpoints would be told in IPv6's words."""

ROUTER: dict[str, int] = COMMON | {"SNDHWM": 0, "RCVHWM": 0, "ROUTER_MANDATORY": 1}
"""MANDATORY: a message for a peer that has gone is an error here, not silently nothing."""

XPUB: dict[str, int] = COMMON | {"SNDHWM": 4, "XPUB_VERBOSE": 1}
"""A slow subscriber misses versions rather than delaying others; heartbeats tell it of the newest, which it pulls.
VERBOSE: every new subscriber is heard of, and gets the last version again."""

SUB: dict[str, int] = COMMON | {"RCVHWM": 4, "IPV6": 1}
"""Few versions wait: each is applied between two steps or replaced by a newer one."""
