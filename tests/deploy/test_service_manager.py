"""Messages of processes to a service manager, over a real datagram socket in the place of systemd's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from headrace.deploy.process.event_loop import EventLoop
from headrace.deploy.process.service_manager import ServiceManager
from support.service_manager import Manager
from support.waiting import TIMEOUT_S, wait_until

Closing = Callable[[ServiceManager], ServiceManager]
HEADRACE = [sys.executable, "-m", "headrace.deploy"]


@pytest.fixture(params=["file", "abstract"])
def any_manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    address = f"@headrace-test-{os.getpid()}" if request.param == "abstract" else str(tmp_path / "notify")
    manager = Manager(address)
    yield manager
    manager.close()


@pytest.fixture
def closing() -> Iterator[Closing]:
    """Give a function that returns the object that it gets, which is closed after the test."""
    with ExitStack() as stack:

        def close_later(service: ServiceManager) -> ServiceManager:
            stack.callback(service.close)
            return service

        yield close_later


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    manager = Manager(str(tmp_path / "notify"))
    yield manager
    manager.close()


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_service_sends_ready_once_and_signs_of_life_in_time(any_manager: Manager, closing: Closing) -> None:
    clock = Clock()
    service = closing(ServiceManager(any_manager.address, 8.0, clock))
    service.alive()
    assert any_manager.take() == [], "no manager watches before the service is ready"
    for _ in range(80):  # eight seconds
        service.turn()
        clock.now_s += 0.1
    assert any_manager.take() == ["READY=1", *["WATCHDOG=1"] * 4]
    service.status(lambda: "one\nline" + "." * 1000)
    service.status(lambda: "another within five seconds")
    service.stopping()
    (status, stopping) = any_manager.take()
    assert status.startswith("STATUS=one")
    assert "\n" not in status
    assert len(status) < 250
    assert stopping == "STOPPING=1"


def test_a_loop_that_does_not_turn_gives_no_sign_of_life(manager: Manager, closing: Closing) -> None:
    clock = Clock()
    service, loop = closing(ServiceManager(manager.address, 8.0, clock)), EventLoop(clock)
    service.ready()
    service.follow(loop)
    for _ in range(3):
        clock.now_s += 2.0
        loop.turn(0.0)
    assert manager.take() == ["READY=1", *["WATCHDOG=1"] * 4]
    clock.now_s += 100.0
    assert manager.take() == []


def test_a_service_hides_its_manager_from_child_processes(
    manager: Manager, closing: Closing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", manager.address)
    monkeypatch.setenv("WATCHDOG_USEC", "1000000")
    monkeypatch.setenv("WATCHDOG_PID", "1")
    service = closing(ServiceManager.from_environment())
    assert not {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"} & set(os.environ)
    service.turn()
    assert manager.take() == ["READY=1"], "the watchdog is that of another process"


@pytest.mark.parametrize("address", ["", "relative/path", "vsock:2:1234", "/no/such/socket"])
def test_a_process_without_a_reachable_manager_continues(
    address: str, closing: Closing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    monkeypatch.setenv("WATCHDOG_USEC", "9" * 30)
    service = closing(ServiceManager.from_environment())
    service.turn()
    service.status(lambda: "x")
    service.stopping()


@pytest.mark.processes
def test_a_broker_gives_signs_of_life_until_it_is_stopped(manager: Manager, tmp_path: Path) -> None:
    command = [*HEADRACE, "broker", "--fleet-id", "x", "--run-dir", str(tmp_path / "run")]
    with subprocess.Popen(command, env=manager.environment(), stderr=subprocess.DEVNULL) as broker:
        try:
            wait_until(lambda: manager.hears("READY=1"), "the broker to be ready")
            wait_until(lambda: manager.hears("WATCHDOG=1"), "a sign of life")
            broker.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, broker.pid, os.WSTOPPED | os.WNOWAIT)
            manager.take()
            with pytest.raises(AssertionError):
                wait_until(manager.take, "a sign of life of a stopped process", 1.0)
            broker.send_signal(signal.SIGCONT)
            wait_until(lambda: manager.hears("WATCHDOG=1"), "a sign of life after it goes on")
        finally:
            broker.send_signal(signal.SIGCONT)
            broker.terminate()
        assert broker.wait(TIMEOUT_S) == 0
    assert manager.told.count("READY=1") == 1
