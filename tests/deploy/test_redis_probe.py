"""The Redis probe, with servers that do not answer, answer late, or only report that they are busy."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from headrace.broker.redis.client import REDIS_FAILURES, connect
from headrace.deploy.fleet.redis_probe import PINGS, RedisProbe
from headrace.deploy.fleet.watchdog import FleetWatchdog, recorders_by_slot
from headrace.deploy.process.supervisor import ProcessSpec, Role
from headrace.deploy.run.redis_server import prepare_redis, wait_ready
from support.waiting import TIMEOUT_S, wait_until

if TYPE_CHECKING:
    from tests.deploy.conftest import Nursery

SILENT_S = 99.0


@pytest.fixture
def server() -> Iterator[socket.socket]:
    """A server that the test plays."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(TIMEOUT_S)
        yield server


def probe_of(server: socket.socket, silent_s: float = SILENT_S) -> RedisProbe:
    return RedisProbe(f"redis://:pw@127.0.0.1:{server.getsockname()[1]}/0", lambda: silent_s, 5.0)


def looks(probe: RedisProbe, first: float, last: float) -> list[float]:
    """Return the probe's unanswered seconds at each second from `first` to `last`."""
    return [probe.unanswered_s(first + second) for second in range(int(last - first) + 1)]


def test_a_server_that_answers_none_of_three_pings_is_unresponsive(server: socket.socket) -> None:
    probe = probe_of(server)
    assert looks(probe, 1.0, 15.0) == [0.0] * 15
    assert probe.unanswered_s(16.0) == 15.0
    for _ in range(PINGS):
        connection, _ = server.accept()
        with connection:
            assert connection.recv(100) == b"AUTH pw\r\nPING\r\n"
    probe.forget()
    assert probe.unanswered_s(17.0) == 0.0, "it begins again"
    probe.forget()


@pytest.mark.parametrize("answer", [b"+OK\r\n+PONG\r\n", b"-LOADING a\r\n-LOADING b\r\n", b""])
def test_a_server_that_answers_late_is_responsive(server: socket.socket, answer: bytes) -> None:
    """The first PING is answered after the third was sent; b"" closes the connection."""
    probe = probe_of(server)
    looks(probe, 1.0, 15.0)
    connection, _ = server.accept()
    with connection:
        assert connection.recv(100)
        connection.sendall(answer)
        connection.shutdown(socket.SHUT_WR)
        assert looks(probe, 16.0, 30.0) == [0.0] * 15
    probe.forget()


def test_a_server_that_only_reports_that_it_is_busy_is_unresponsive(server: socket.socket) -> None:
    probe = probe_of(server)
    looks(probe, 1.0, 15.0)
    connection, _ = server.accept()
    with connection:
        connection.sendall(b"+OK\r\n-BUSY Redis is busy running a script.\r\n")
        assert probe.unanswered_s(16.0) == 15.0
    probe.forget()


def test_a_server_that_answers_the_fleet_or_does_not_listen_is_left_alone(server: socket.socket) -> None:
    assert looks(probe_of(server, silent_s=0.5), 1.0, 60.0) == [0.0] * 60
    silent = probe_of(server)
    server.close()
    assert looks(silent, 1.0, 60.0) == [0.0] * 60


def answers(url: str) -> bool:
    with contextlib.closing(connect(url)) as client, contextlib.suppress(*REDIS_FAILURES):
        return bool(client.ping())
    return False


@pytest.mark.processes
def test_a_real_server_in_an_endless_script_is_killed_and_replaced(nursery: Nursery, tmp_path: Path) -> None:
    launch = prepare_redis(tmp_path)
    service = nursery.supervisor.start(ProcessSpec("redis", Role.REDIS, lambda _: list(launch.argv)))
    wait_ready(launch.url, TIMEOUT_S)
    hung = service.child
    assert hung is not None

    with contextlib.closing(connect(launch.url, TIMEOUT_S)) as client:
        client.set("kept", 1)

    def hang() -> None:
        with contextlib.suppress(*REDIS_FAILURES), contextlib.closing(connect(launch.url, TIMEOUT_S)) as client:
            client.eval("while true do end", 0)

    script = threading.Thread(target=hang)
    script.start()
    wait_until(lambda: not answers(launch.url), "the script")
    probe = RedisProbe(launch.url, lambda: SILENT_S, ping_every_s=0.5)
    watch = FleetWatchdog(
        nursery.loop, nursery.supervisor, recorders_by_slot(tmp_path), 1.0, first_sign_s={}, redis=probe
    )
    nursery.until(lambda: service.restarts > 0 and not service.zombies)
    watch.stop()
    probe.forget()
    script.join(TIMEOUT_S)
    nursery.until(lambda: service.child is not None and service.child is not hung)
    wait_ready(launch.url, TIMEOUT_S)
    with contextlib.closing(connect(launch.url, TIMEOUT_S)) as client:
        assert client.get("kept") == b"1"
