"""Free ports that the kernel never gives to an outgoing connection.

A client that reconnects on loopback to a port of the ephemeral range, while no server listens there, may be given that
very port as its own. TCP then connects the client to itself, and the server cannot have its port back.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

LOWEST, HIGHEST = 10_000, 65_535
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_TRIES = 64


def quiet_ports(rng: random.Random | None = None) -> Iterator[int]:
    """Yield some ports outside the ephemeral range, in random order, for the caller to try one after another.

    Yields none where the range leaves none, or cannot be read.
    """
    low, high = ephemeral_range()
    outside = [*range(LOWEST, min(low, HIGHEST)), *range(max(high + 1, LOWEST), HIGHEST + 1)]
    yield from (rng or random.Random()).sample(outside, min(_TRIES, len(outside)))


def ephemeral_range() -> tuple[int, int]:
    """Return the first and last port that the kernel gives to outgoing connections; all ports where it does not say."""
    try:
        low, high = map(int, _RANGE.read_text().split())
    except (OSError, ValueError):
        return 0, HIGHEST
    return low, high


def ports_to_try(port: int) -> Iterator[int | str]:
    """Yield the ports at which to bind, one after another; for 0 quiet ones, then "*", with which libzmq takes any."""
    if port:
        yield port
        return
    yield from quiet_ports()
    yield "*"
