"""A fleet over five machines with keys, which are cut off, lost, added and exchanged: its books stay exact."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from headrace.deploy.run.fleet_file import read_fleet_file
from headrace.deploy.run.key_pairs import make_keys
from headrace.schemas.peers.rendezvous import Rendezvous
from support.fleets.machines import Machines
from support.fleets.two_machines import NoNamespacesError
from support.waiting import TIMEOUT_S, wait_until

pytestmark = [pytest.mark.netns, pytest.mark.chaos]

WORKER_FILES = ("worker.secret", "supervisor.secret", "broker.public")
SETTINGS = ("--env", "CartPole-v1", "--num-envs", "4", "--set", "broker.lease_s=4")


@pytest.fixture
def machines() -> Iterator[Machines]:
    with ExitStack() as stack:
        try:
            yield stack.enter_context(Machines("head", "second", "one", "two", "three"))
        except NoNamespacesError as error:
            pytest.skip(str(error))


class Hosts:
    """The processes of the test, and the folder that all machines share."""

    def __init__(self, machines: Machines, folder: Path, stack: ExitStack) -> None:
        self.machines, self.shared, self._stack = machines, folder, stack
        self.run_dir, self.meet = folder / "run", folder / "meet.json"
        make_keys(folder / "keys")

    def start(self, machine: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = self.machines.command(machine, sys.executable, "-m", "headrace.deploy", *arguments)
        with (self.shared / f"{machine}.log").open("ab") as log:
            process = self._stack.enter_context(subprocess.Popen(command, cwd=self.shared, stdout=log, stderr=log))
        self._stack.callback(lambda: process.poll() is None and process.kill())
        return process

    def fleet(self, machine: str, *more: str) -> subprocess.Popen[bytes]:
        at = (
            "broker.host=0.0.0.0",
            f"broker.advertise={self.machines.address(machine)}",
            f"fleet.rendezvous={self.meet}",
        )
        sets = [word for setting in (*at, f"keys.dir={self.shared / 'keys'}") for word in ("--set", setting)]
        return self.start(machine, "up", "--run-dir", str(self.run_dir), "--workers", "0", *SETTINGS, *sets, *more)

    def workers(self, machine: str) -> subprocess.Popen[bytes]:
        keys = self.shared / f"keys-{machine}"
        if not keys.exists():
            keys.mkdir(mode=0o700)
            for name in WORKER_FILES:
                shutil.copy2(self.shared / "keys" / name, keys)
        options = ("--count", "1", "--scratch-dir", str(self.shared / f"disk-{machine}"), "--set", f"keys.dir={keys}")
        return self.start(machine, "worker", "--rendezvous", str(self.meet), *SETTINGS, *options)

    def env_steps(self) -> int:
        """Return the env steps of all runs, as the supervisor last noted them in the shared folder."""
        try:
            return read_fleet_file(self.run_dir / "fleet.json").env_steps
        except Exception:
            return 0

    def is_told(self, what: str) -> bool:
        """Return whether a broker has said this in its log."""
        return what in (self.run_dir / "logs" / "broker.log").read_text()

    def await_progress(self, what: str) -> None:
        before = self.env_steps()
        wait_until(lambda: self.env_steps() > before, f"env steps {what}")

    def await_joined(self, machine: str) -> None:
        """Wait until the worker of `machine` is one of the fleet. Steps may be those of another one."""
        logs = self.shared / f"disk-{machine}"
        joined = "joined fleet"
        wait_until(lambda: any(joined in log.read_text() for log in logs.rglob("*.log")), f"{machine} to join")

    def ask(self, machine: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command that reads the fleet's Redis, which is on loopback of the head's `machine`."""
        words = (sys.executable, "-m", "headrace.deploy", *arguments, "--run-dir", str(self.run_dir))
        command = self.machines.command(machine, *words)
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)

    def await_lost(self, expected: bool) -> None:
        """Wait until the first broker has let go of a worker, or knows all of them."""
        lost = "its connection ended without a word"
        what = "a lost worker" if expected else "no lost worker"
        wait_until(lambda: (lost in self.ask("head", "why").stdout) == expected, what, pause_s=0.5)

    def audit(self) -> subprocess.CompletedProcess[str]:
        return self.ask("second", "audit", "--strict")

    def published(self) -> str:
        return Rendezvous(str(self.meet)).find("worker")


@pytest.mark.thorough
def test_books_stay_exact_as_hosts_are_lost_and_added_and_the_broker_moves(machines: Machines, tmp_path: Path) -> None:
    with ExitStack() as stack:
        hosts = Hosts(machines, tmp_path, stack)
        one, two = hosts.workers("one"), hosts.workers("two")
        head = hosts.fleet("head")
        hosts.await_joined("one")
        hosts.await_joined("two")
        hosts.await_progress("of hosts that came before their fleet")

        machines.connect("one", connected=False)
        hosts.await_progress("while one host is cut off")
        hosts.await_lost(True)
        machines.connect("one", connected=True)
        hosts.await_lost(False)
        hosts.await_progress("of a host that is back")
        machines.connect("two", connected=False)  # for ever
        hosts.await_lost(True)
        three = hosts.workers("three")  # it takes the slot that is free
        hosts.await_lost(False)
        hosts.await_progress("of a host that was added")

        stop_all(hosts, head)
        head = hosts.fleet("second")
        wait_until(lambda: machines.address("second") in hosts.published(), "the broker's new address")
        hosts.await_progress("after the broker has moved to another host")
        for group in (one, three):
            assert group.poll() is None, "it has followed the broker"
            group.send_signal(signal.SIGTERM)
        assert [group.wait(TIMEOUT_S) for group in (one, three)] == [0, 0]
        # A newer worker has the slot of the lost host's. The broker closes the books of that life a minute later.
        wait_until(lambda: hosts.is_told("no supervisor has told of its end"), "the broker to close books", pause_s=0.5)
        wait_until(lambda: "claims to be live" not in hosts.audit().stdout, "the books of the lost host", pause_s=2.0)
        two.kill()
        head.send_signal(signal.SIGTERM)
        assert head.wait(TIMEOUT_S) == 0, (tmp_path / "second.log").read_text()
        audited = hosts.audit()
        assert audited.returncode == 0, audited.stdout + audited.stderr


def stop_all(hosts: Hosts, head: subprocess.Popen[bytes]) -> None:
    """Kill a whole machine's part of the fleet at once, as a power loss would."""
    pids = [process.pid for process in read_fleet_file(hosts.run_dir / "fleet.json").processes]
    head.kill()
    for pid in pids:
        subprocess.run(["kill", "-9", str(pid)], capture_output=True, check=False)
    head.wait(TIMEOUT_S)
