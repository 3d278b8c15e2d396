"""Ports for tests that run side by side: each process of them has its own, and fleets choose theirs from 10,000 on."""

from __future__ import annotations

import os
import random
import socket
from contextlib import suppress

_FIRST, _EACH, _PROCESSES = 2_000, 1_500, 5


def free_port() -> int:
    """A loopback TCP port that nobody listened on a moment ago, and that no outgoing connection is given."""
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _PROCESSES
    first = _FIRST + _EACH * number
    for port in random.Random().sample(range(first, first + _EACH), 64):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")
