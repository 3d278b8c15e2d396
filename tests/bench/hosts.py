"""Weights from `publish` until the last worker on two other hosts has loaded them, over links of 1 Gbit/s.

Each host is a network namespace with memory of its own, and a veth bounded by tbf. The broker's host has such a link
too, so copies for two hosts share its 1 Gbit/s. `headrace` is the publisher here, a broker beside it, and links of four
workers on each host. `curve` is the same with keys. The limit is bare TCP: the version is sent once to each host, where
one process reads its bytes.

The row `copies` counts the bytes that come to the hosts, headers included, as copies of the version a host.

PYTHONPATH=tests python -m bench.run --only hosts
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

from bench.processes import Processes, until_terminated
from bench.table import Row, rows_of
from bench.transport import made_keys
from bench.turns import in_turns
from bench.weights import Headrace, Publishing
from headrace.schemas.messages import shared_weights
from support.fleets.machines import Machines
from support.fleets.two_machines import NoNamespacesError

CASES = (20.0, 100.0)
"""Megabytes of a version."""

WORKERS = 4
MARK = 1 / 1.2
MOST_COPIES = 1.1
_HOSTS = ("one", "two")
_BITS_PER_S = 1_000_000_000
_READ_BYTES = 1 << 20
_COUNTED = 3
"""Versions for which the bytes on the wire are counted."""


def measure(seconds: float, rounds: int, cases: Sequence[float] = CASES) -> list[Row]:
    """Measure all arms in turns, case by case. No rows, and a word why, where namespaces cannot be made."""
    with ExitStack() as stack:
        try:
            machines = stack.enter_context(Machines("head", *_HOSTS))
            for name in ("head", *_HOSTS):
                machines.limit(name, _BITS_PER_S)
        except NoNamespacesError as error:
            print(f" skipped: {error}", end="", file=sys.stderr)
            return []
        stack.enter_context(machines.on("head"))
        memory = Path("/dev/shm", f"headrace-bench-{os.getpid()}")
        stack.callback(shutil.rmtree, memory, ignore_errors=True)
        return [row for megabytes in cases for row in _measure(machines, memory, megabytes, seconds, rounds)]


def _measure(machines: Machines, memory: Path, megabytes: float, seconds: float, rounds: int) -> list[Row]:
    nbytes, case = int(megabytes * 1e6), f"{megabytes:g} MB to {len(_HOSTS)} hosts of {WORKERS}"
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="headrace-bench-")))
        headrace = _fleet(stack, machines, memory / "plain", nbytes)
        curve = _fleet(stack, machines, memory / "curve", nbytes, made_keys(folder))
        readers = [stack.enter_context(Processes(partial(machines.enter, name))) for name in _HOSTS]
        limit = stack.enter_context(BareTcp(nbytes, machines.address("head"), readers))
        turns = in_turns({"bare TCP": limit, "headrace": headrace, "curve": curve}, seconds, rounds)
        copies = _copies(machines, headrace, nbytes)
    rows = rows_of("hosts", case, "KB/s", turns, "bare TCP", {"headrace": MARK})
    return [*rows, Row("hosts", case, "headrace", "copies", copies, copies, copies, copies, most=MOST_COPIES)]


def _fleet(stack: ExitStack, machines: Machines, memory: Path, nbytes: int, keys: str = "") -> Headrace:
    """Start a fleet over the hosts, whose memory no other fleet of this bench uses."""
    head, *hosts = (
        stack.enter_context(Processes(partial(_enter, machines, name, memory))) for name in ("head", *_HOSTS)
    )
    _use_memory(memory / "head")
    broker = {"host": machines.address("head"), "allow_insecure": not keys}
    return stack.enter_context(Headrace(nbytes, WORKERS, head, hosts, broker, keys))


def _copies(machines: Machines, headrace: Headrace, nbytes: int) -> float:
    """Publish some versions, and return how many copies of one came to each host."""
    before = sum(map(machines.received_bytes, _HOSTS))
    for _ in range(_COUNTED):
        headrace.take()
    return (sum(map(machines.received_bytes, _HOSTS)) - before) / nbytes / len(_HOSTS) / _COUNTED


def _enter(machines: Machines, name: str, memory: Path) -> None:
    """Move this process to a host: to its network, and to memory that only its processes share."""
    machines.enter(name)
    _use_memory(memory / name)


def _use_memory(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    shared_weights.MEMORY = folder


class BareTcp(Publishing):
    """The bare limit: each byte of a version goes once to each host."""

    def __init__(self, nbytes: int, address: str, hosts: Sequence[Processes]) -> None:
        super().__init__(nbytes, len(hosts))
        with socket.create_server((address, 0)) as server:
            self.pids = {
                f"reader {n}": host.start(_read, server.getsockname(), nbytes, self.loaded)
                for n, host in enumerate(hosts)
            }
            self._links = [server.accept()[0] for _ in hosts]
        self.await_workers()

    def publish(self) -> None:
        sending = [threading.Thread(target=self._send, args=(link,)) for link in self._links]
        for thread in sending:
            thread.start()
        for thread in sending:
            thread.join()

    def _send(self, link: socket.socket) -> None:
        for array in self.state.values():
            link.sendall(array.data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for link in self._links:
            link.close()


def _read(address: tuple[str, int], nbytes: int, loaded: Any) -> None:
    """Run a process that reads versions of so many bytes."""
    stopping, target = until_terminated(), bytearray(_READ_BYTES)
    with socket.create_connection(address) as link:
        link.settimeout(0.5)
        loaded.release()
        have = 0
        while not stopping.is_set():
            try:
                have += link.recv_into(target)
            except TimeoutError:
                continue
            if have == nbytes:
                have = 0
                loaded.release()
