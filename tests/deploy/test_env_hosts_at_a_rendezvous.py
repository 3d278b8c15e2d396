"""Env hosts that know only the rendezvous of their fleet: they find workers on other machines, and follow them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from headrace.deploy.process.recorders import recorders_in
from headrace.deploy.run.key_pairs import make_keys
from headrace.schemas.accounts.recorder import read_recorder
from headrace.schemas.credentials.key_files import read_public_key
from headrace.schemas.errors import ExitCode
from headrace.schemas.peers.rendezvous import Published, Rendezvous
from support.fleets.running_fleet import RunningFleet
from support.waiting import TIMEOUT_S, wait_until

SETTINGS = ("--env", "CartPole-v1", "--num-envs", "2")
REMOTE = ("--set", "sampling.env_placement=remote", "--set", "broker.lease_s=4", "--set", "broker.host=127.0.0.1")


class Machine:
    """One process of the fleet in a folder of its own, as on a machine of its own."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self._words = folder, folder / "words"
        with self._words.open("ab") as words:
            command = [sys.executable, "-m", "headrace.deploy", *arguments]
            self.process = subprocess.Popen(command, cwd=folder, stdout=words, stderr=words)

    def said(self) -> str:
        return self._words.read_text()

    def wait_until(self, condition: object, what: str) -> None:
        def met() -> bool:
            assert self.process.poll() is None, self.said()
            return bool(condition())  # type: ignore[operator]

        wait_until(met, what)

    def pid_of_life(self, slot: int, incarnation: int) -> int:
        """The process of a life of a worker of this machine's group, once it is there."""

        def find() -> int:
            paths = dict(found for folder in self.folder.glob("disk/*/recorders") for found in recorders_in(folder))
            path = paths.get((slot, incarnation))
            reading = read_recorder(path) if path is not None else None
            return reading.pid if reading is not None else 0

        return wait_until(find, f"life {incarnation} of worker {slot}")


@contextmanager
def machine(folder: Path, *arguments: str) -> Iterator[Machine]:
    started = Machine(folder, *arguments)
    try:
        yield started
    finally:
        started.process.terminate()
        started.process.wait(TIMEOUT_S)


def host(tmp_path: Path, number: int, *more: str) -> tuple[Any, ...]:
    return (tmp_path / f"host-{number}", "env-host", "--rendezvous", str(tmp_path / "meet.json"), *SETTINGS, *more)


def waiting_for(first: Machine, meet: Path) -> tuple[str, str]:
    """Return the option that names the rendezvous, once a host has said that it waits for it."""
    first.wait_until(lambda: f"{meet} cannot be read" in first.said(), "the sentence that it waits")
    return "--set", f"fleet.rendezvous={meet}"


def has_bound(socket: socket.socket, address: str) -> bool:
    with suppress(OSError):
        socket.bind(("127.0.0.1", urlsplit(address).port or 0))
        return True
    return False


def published(tmp_path: Path) -> Published:
    found = Rendezvous(str(tmp_path / "meet.json")).look()
    assert found is not None
    return found


@pytest.mark.thorough
@pytest.mark.chaos
def test_waiting_env_hosts_spread_over_workers_and_find_one_on_a_new_port(tmp_path: Path) -> None:
    meet, keys = tmp_path / "meet.json", ("--set", f"keys.dir={tmp_path / 'keys'}")
    make_keys(tmp_path / "keys")
    options = ("--rendezvous", str(meet), "--count", "2", "--scratch-dir", "disk", *SETTINGS, *REMOTE, *keys)
    with (
        machine(*host(tmp_path, 1, *keys)) as first,
        machine(*host(tmp_path, 2, *keys)) as second,
        machine(tmp_path / "workers", "worker", *options) as workers,
        RunningFleet(tmp_path / "run", "--workers", "0", *SETTINGS, *REMOTE, *keys, *waiting_for(first, meet)) as fleet,
    ):

        def accepted(slot: int, incarnation: int) -> bool:
            snapshot = fleet.snapshot()
            row = snapshot.rows.get((slot, incarnation)) if snapshot else None
            return row is not None and row.accepted[0] > 0

        fleet.wait_until(lambda: accepted(1000, 1) and accepted(1001, 1), "each worker to have a host of its own")
        before = published(tmp_path).ports
        assert set(before) == {"envs-1000", "envs-1001"}
        assert before["envs-1000"].host == socket.gethostname()
        assert before["envs-1000"].key == read_public_key(tmp_path / "keys" / "worker.public").fingerprint
        os.kill(workers.pid_of_life(1000, 1), signal.SIGKILL)
        with socket.socket() as taken:  # so the next life has another port
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            wait_until(lambda: has_bound(taken, before["envs-1000"].address), "its port to be free")
            fleet.wait_until(lambda: accepted(1000, 2), "the worker's next life delivers")
        after = published(tmp_path).ports
        assert after["envs-1000"].address != before["envs-1000"].address
        assert after["envs-1001"].address == before["envs-1001"].address
        workers.process.terminate()
        assert workers.process.wait(TIMEOUT_S) == 0, workers.said()
        wait_until(lambda: not published(tmp_path).ports, "the ports of workers that have left to go")
        fleet.terminate()
        result = fleet.finish()
        assert result["returncode"] == 0, result["stderr"]
        audited = fleet.audit()
        assert audited.returncode == 0, audited.stdout + audited.stderr
    assert (first.process.returncode, second.process.returncode) == (0, 0), first.said() + second.said()


@pytest.mark.one_in(3)
@pytest.mark.processes
@pytest.mark.parametrize(
    ("content", "more", "code", "words"),
    [
        (None, (), ExitCode.UNREACHABLE, "meet.json cannot be read (No such file or directory)"),
        (
            Published(fleet_id="demo", endpoints={}),
            ("--slot", "3"),
            ExitCode.UNREACHABLE,
            "names no worker of slot 3 that serves env hosts",
        ),
        (None, ("--connect", "tcp://a:1"), ExitCode.CONFIG, "give either --connect or --rendezvous"),
    ],
)
def test_an_env_host_that_finds_no_worker_ends_with_an_error(
    tmp_path: Path, content: Published | None, more: tuple[str, ...], code: ExitCode, words: str
) -> None:
    if content is not None:
        content.write(tmp_path / "meet.json")
    with machine(*host(tmp_path, 1, *more, "--set", "worker.connect_timeout_s=1")) as ended:
        assert ended.process.wait(TIMEOUT_S) == code, ended.said()
        assert words in ended.said().rpartition("error: ")[2]


@pytest.mark.processes
def test_a_dns_rendezvous_needs_a_port_in_the_settings(tmp_path: Path) -> None:
    arguments = ("env-host", "--rendezvous", "dns://head", *SETTINGS)
    with machine(tmp_path / "host", *arguments) as ended:
        assert ended.process.wait(TIMEOUT_S) == ExitCode.CONFIG
        assert "needs sampling.env_hosts_port in the settings" in ended.said()
