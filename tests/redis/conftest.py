"""Real Redis servers for tests: one shared by a session, others that a test may kill, stop and restart."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from headrace.deploy.run.redis_server import RedisLaunch, find_server, prepare_redis, wait_ready
from headrace.schemas.accounts.ledger import LedgerRow, Settled, WorkerTotals
from support import ports
from support.secured_redis import Certificates, SecuredRedis, TlsFront, has_tls

Options = tuple[str, ...]


class Server:
    """A Redis server of a run directory, to be killed and restarted at the same URL."""

    def __init__(self, run_dir: Path, *options: str) -> None:
        self.launch: RedisLaunch = prepare_redis(run_dir)
        self.url = self.launch.url
        self.options = options
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Server:
        command = [*self.launch.argv, *self.options]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        wait_ready(self.url, 30.0)
        return self

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def client(self) -> Any:
        return redis.Redis.from_url(self.url, protocol=2)


class LossyProxy:
    """Forwards to a server; while `losing`, the reply to each call of a script is lost and the connection broken."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.losing = threading.Event()
        self.lost = 0
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []
        self._start(self._accept)

    def _start(self, target: Callable[..., None], *args: socket.socket) -> None:
        thread = threading.Thread(target=target, args=args)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._port))
            self._sockets += [near, far]
            self._start(self._forward, near, far)

    def _forward(self, near: socket.socket, far: socket.socket) -> None:
        """Redis clients ask one thing at a time: a request goes out whole, then its answer comes."""
        with near, far:
            while request := _until_silent(near):
                far.sendall(request)
                answer = _until_silent(far)
                if self.losing.is_set() and b"EVALSHA" in request and not answer.startswith(b"-NOSCRIPT"):
                    self.lost += 1
                    return
                try:
                    near.sendall(answer)
                except OSError:
                    return

    def close(self) -> None:
        for sock in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join()


def _until_silent(sock: socket.socket) -> bytes:
    """Return the bytes that come until the socket is silent for 10 ms; empty at the end of the connection."""
    received = b""
    try:
        sock.settimeout(None)
        while piece := sock.recv(1 << 20):
            received += piece
            sock.settimeout(0.01)
    except OSError:
        pass
    return received


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("redis")).start()
    yield server
    server.kill()


@pytest.fixture
def url(shared_server: Server) -> str:
    return shared_server.url


@pytest.fixture
def client(shared_server: Server) -> Iterator[Any]:
    with shared_server.client() as client:
        yield client


@pytest.fixture
def make_server(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def make(*options: str) -> Server:
        servers.append(Server(tmp_path / f"run-{len(servers)}", *options))
        return servers[-1]

    yield make
    for server in servers:
        server.kill()


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes certificates, is not installed")
    return Certificates(tmp_path_factory.mktemp("tls") / "certificates")


@pytest.fixture
def secured(make_server: Callable[..., Server], certificates: Certificates) -> Iterator[SecuredRedis]:
    """A server that asks its clients for certificates: by itself if its program has TLS, else behind a front."""
    if has_tls(find_server()):
        port = ports.free_port()
        server = make_server("--tls-port", str(port), *certificates.server_options()).start()
        yield SecuredRedis(server.url, port, certificates)
        return
    server = make_server().start()
    with contextlib.closing(TlsFront(certificates, "server", server.launch.port, asks_client=True)) as front:
        yield SecuredRedis(server.url, front.port, certificates)


@pytest.fixture
def make_proxy() -> Iterator[Callable[[int], LossyProxy]]:
    proxies: list[LossyProxy] = []

    def make(port: int) -> LossyProxy:
        proxies.append(LossyProxy(port))
        return proxies[-1]

    yield make
    for proxy in proxies:
        proxy.close()


@pytest.fixture
def fleet_id() -> str:
    return f"fleet-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def make_row() -> Callable[..., LedgerRow]:
    """A ledger row that balances: `batches` of 32 steps in 2 chunks each, of which `settled` were committed."""

    def make(
        slot: int = 0, incarnation: int = 1, batches: int = 10, settled: int = 7, closed: bool = False
    ) -> LedgerRow:
        steps, chunks = 32 * batches, 2 * batches
        committed, dropped = (32 * (settled - 1), 2 * (settled - 1)), {"stale": (32, 2)}
        if settled == 0:
            committed, dropped = (0, 0), {}
        lost = {"worker_killed": (32, 2)} if closed else {}
        lost_steps, lost_chunks = (32, 2) if closed else (0, 0)
        open_steps = 0 if closed else 5
        totals = WorkerTotals(
            seq=batches + (1 if closed else 0),
            stepped=steps + lost_steps + open_steps + 9 + 16,
            open=open_steps,
            shipped=steps + lost_steps,
            shipped_chunks=chunks + lost_chunks,
            discarded={"env_exception": 9},
            dropped={"oversize": (16, 1)},
            episodes=3 * batches,
            env_failures=1,
            env_steps=steps + 3,
            module_steps={"one": steps - 8, "two": 8},
            env_rebuilds=1,
        )
        return LedgerRow(
            slot=slot,
            incarnation=incarnation,
            totals=totals,
            accepted=(steps, chunks),
            held=(32 * (batches - settled), 2 * (batches - settled)),
            settled=Settled(seq=settled, committed=committed, dropped=dropped),
            lost=lost,
            closed=closed,
        )

    return make
