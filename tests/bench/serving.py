"""The policy server: actions per second and waiting times, by ZeroMQ over a Unix socket, and by HTTP on loopback.

The limit is a bare ROUTER on a Unix socket. It gathers the requests of its REQ clients, runs the same policy on all of
them at once and answers, without any promise. An application that does the same behind uvicorn shows the cost of HTTP
alone. A server is one process on either side. All clients are sockets of this one, and each asks again as soon as it is
answered; what they say is written before their turn and answers are only looked at, so that a client costs the same two
frames more or less, whomever it asks.

PYTHONPATH=tests python -m bench.run --only serving
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from time import perf_counter
from typing import Protocol

import numpy as np

from bench.processes import Processes
from bench.serving_clients import Bare, ByHttp, ByZmq
from bench.serving_servers import echo, echo_http, serve
from bench.table import Row, rows_of
from bench.turns import in_turns
from headrace.schemas.peers.ports import quiet_ports

CLIENTS = (1, 8, 64)
MARK = 0.6


def measure(seconds: float, rounds: int) -> list[Row]:
    """Measure both transports and both bare servers in turns, for each number of clients."""
    return [row for count in CLIENTS for row in _measure(count, seconds, rounds)]


def _measure(count: int, seconds: float, rounds: int) -> list[Row]:
    case = f"{count} client{'s' * (count > 1)}"
    with Processes() as processes, ExitStack() as stack:
        uvicorn_port, http_port = _free_ports(2)
        echoing, served = f"ipc://{processes.folder}/echo", f"ipc://{processes.folder}/clients-0"
        bare = processes.start(echo, echoing)
        uvicorn = processes.start(echo_http, uvicorn_port)
        by_zmq = processes.start(serve, str(processes.folder), None, count)
        by_http = processes.start(serve, "", http_port, count)
        arms = {
            "echo": Asking(Bare(echoing, count), {"echo": bare}),
            "zeromq": Asking(ByZmq(served, count), {"server": by_zmq}),
            "uvicorn": Asking(ByHttp(uvicorn_port, count), {"uvicorn": uvicorn}),
            "http": Asking(ByHttp(http_port, count), {"server": by_http}),
        }
        for arm in arms.values():
            stack.callback(arm.way.close)
        turns = in_turns(arms, seconds, rounds)
    rows = rows_of("serving", case, "actions/s", turns, "echo", {"zeromq": MARK, "http": MARK})
    for share in (50, 99):
        waits = {name: 1e6 * float(np.percentile(arm.waits_s, share)) for name, arm in arms.items()}
        for name, wait_us in waits.items():
            ratio = wait_us / waits["echo"]
            rows.append(Row("serving", f"{case}: wait, p{share}", name, "us", wait_us, ratio, ratio, ratio))
    return rows


def _free_ports(count: int) -> list[int]:
    free = []
    for port in quiet_ports():
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                free.append(port)
        if len(free) == count:
            return free
    raise OSError(f"{count} free ports are not to be found")


class Way(Protocol):
    """Clients by number, each with a connection of its own."""

    count: int

    def write(self) -> None:
        """Encode requests ahead of the turn."""

    def ask(self, client: int) -> None: ...
    def answered(self) -> Iterable[int]:
        """Take the answers that have arrived; wait for at least one, with a deadline."""

    def close(self) -> None: ...


class Asking:
    """An arm. `take` looks at the sockets and returns how many requests were answered."""

    def __init__(self, way: Way, pids: Mapping[str, int]) -> None:
        self.way, self.pids = way, pids
        self.waits_s: list[float] = []
        self._asked_at = [0.0] * way.count

    def begin(self) -> None:
        self.way.write()
        for client in range(self.way.count):
            self._ask(client)

    def take(self) -> int:
        taken = 0
        for client in self.way.answered():
            self.waits_s.append(perf_counter() - self._asked_at[client])
            self._ask(client)
            taken += 1
        return taken

    def end(self) -> None:
        """Wait until all requests are answered."""
        open_ = set(range(self.way.count))
        while open_:
            open_.difference_update(self.way.answered())

    def _ask(self, client: int) -> None:
        self._asked_at[client] = perf_counter()
        self.way.ask(client)
