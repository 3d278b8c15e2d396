"""Ports for tests that run side by side: each process of them has its own, and fleets choose theirs from 10,000 on."""

from __future__ import annotations

import functools
import itertools
import os
import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress

_FIRST, _EACH, _PROCESSES = 2_000, 1_000, 8


@functools.cache
def _ports() -> Iterator[int]:
    """Return the ports of this process, shuffled and without end, each the first of three."""
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _PROCESSES
    first = _FIRST + _EACH * number
    return itertools.cycle(random.Random().sample(range(first, first + _EACH - 2, 3), _EACH // 3))


def by_tcp(port: int | None = None) -> tuple[str, ...]:
    """Return the options by which a fleet serves by TCP on loopback without keys, at `port` or at free ports."""
    settings = ["broker.host=127.0.0.1", "broker.allow_insecure=true"]
    settings += [] if port is None else [f"broker.port={port}"]
    return tuple(word for setting in settings for word in ("--set", setting))


def free_port() -> int:
    """A loopback TCP port that nobody listened on a moment ago, and that no outgoing connection is given.

    The two ports after it are free too, as a broker needs them.
    """
    for port in itertools.islice(_ports(), 64):
        with ExitStack() as probes, suppress(OSError):
            for one in range(port, port + 3):
                probes.enter_context(socket.socket()).bind(("127.0.0.1", one))
            return port
    raise AssertionError("no port is free")
