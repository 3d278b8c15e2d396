"""Free ports that no outgoing connection is ever given.

A client that reconnects, on loopback, to a port of the ephemeral range while nobody listens there may be given that
very port as its own: TCP then connects it to itself, and the server cannot have its port back.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

LOWEST, HIGHEST = 10_000, 65_535
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_TRIES = 64


def quiet_ports(rng: random.Random | None = None) -> Iterator[int]:
    """Some ports outside the ephemeral range, in random order, to be tried one after another; none where it leaves
    none, or cannot be read."""
    low, high = ephemeral_range()
    outside = [*range(LOWEST, min(low, HIGHEST)), *range(max(high + 1, LOWEST), HIGHEST + 1)]
    yield from (rng or random.Random()).sample(outside, min(_TRIES, len(outside)))


def ephemeral_range() -> tuple[int, int]:
    """The first and last port the kernel gives to outgoing connections; all ports where it does not say."""
    try:
        low, high = map(int, _RANGE.read_text().split())
    except (OSError, ValueError):
        return 0, HIGHEST
    return low, high
