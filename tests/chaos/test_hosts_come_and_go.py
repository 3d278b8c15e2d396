"""A fleet over seven machines with keys, which are cut off, lost, added and exchanged: its books stay exact."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from headrace.deploy.process.recorders import recorders_in
from headrace.deploy.run.fleet_file import read_fleet_file
from headrace.deploy.run.key_pairs import make_keys
from headrace.schemas.accounts.recorder import read_recorder
from headrace.schemas.peers.rendezvous import Rendezvous
from support.fleets.machines import Machines
from support.fleets.two_machines import NoNamespacesError
from support.waiting import TIMEOUT_S, wait_until

pytestmark = [pytest.mark.netns, pytest.mark.chaos]

KEY_FILES = {
    "worker": ("worker.secret", "supervisor.secret", "broker.public", "env-host.public"),
    "learner": ("learner.secret", "broker.public"),
    "env-host": ("env-host.secret", "worker.public"),
}
"""The files of keys that each role has, as the guide's table says."""
ENVS = ("--env", "CartPole-v1", "--num-envs", "4")
FIRST_FROM_ELSEWHERE = 1000
SETTINGS = (*ENVS, "--set", "broker.lease_s=4", "--set", "learner.enabled=false")
BY_NAME = (
    "fleet.fleet_id=demo",
    "broker.host=0.0.0.0",
    "broker.port=5701",
    "sampling.env_hosts_port=5800",
)
"""Where peers know a name only, the settings of all have the ports."""
REMOTE = ("sampling.env_placement=remote", "broker.host=0.0.0.0")


@pytest.fixture
def machines() -> Iterator[Machines]:
    with ExitStack() as stack:
        try:
            yield stack.enter_context(Machines("head", "second", "learner", "one", "two", "three", "envs"))
        except NoNamespacesError as error:
            pytest.skip(str(error))


class Hosts:
    """The processes of the test, and the folder that all machines share."""

    def __init__(self, machines: Machines, folder: Path, stack: ExitStack, meet: str = "") -> None:
        self.machines, self.shared, self._stack = machines, folder, stack
        self.run_dir, self.meet = folder / "run", meet or str(folder / "meet.json")
        make_keys(folder / "keys")

    def start(self, machine: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = self.machines.command(machine, sys.executable, "-m", "headrace.deploy", *arguments)
        with (self.shared / f"{machine}.log").open("ab") as log:
            process = self._stack.enter_context(subprocess.Popen(command, cwd=self.shared, stdout=log, stderr=log))
        self._stack.callback(lambda: process.poll() is None and process.kill())
        return process

    def fleet(self, machine: str, *settings: str) -> subprocess.Popen[bytes]:
        settings = settings or (f"fleet.rendezvous={self.meet}",)
        at = ("broker.host=0.0.0.0", f"broker.advertise={self.machines.address(machine)}")
        sets = as_options(*at, f"keys.dir={self.shared / 'keys'}", *settings)
        return self.start(machine, "up", "--run-dir", str(self.run_dir), "--workers", "0", *SETTINGS, *sets)

    def role(self, machine: str, role: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a role on a machine that has the keys of that role alone."""
        keys = self.shared / f"keys-{machine}"
        keys.mkdir(mode=0o700)
        for name in KEY_FILES[role]:
            shutil.copy2(self.shared / "keys" / name, keys)
        return self.start(machine, role, "--rendezvous", self.meet, "--set", f"keys.dir={keys}", *arguments)

    def workers(self, machine: str, *settings: str) -> subprocess.Popen[bytes]:
        scratch = ("--scratch-dir", str(self.shared / f"disk-{machine}"))
        return self.role(machine, "worker", "--count", "1", *scratch, *SETTINGS, *as_options(*settings))

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

    def end(self, *processes: subprocess.Popen[bytes]) -> None:
        """Ask processes to stop, which they do in order."""
        for process in processes:
            process.send_signal(signal.SIGTERM)
        assert {process.wait(TIMEOUT_S) for process in processes} == {0}, self.said()[-8000:]

    def said(self) -> str:
        return "".join(path.read_text() for path in sorted(self.shared.glob("*.log")))

    def accepted_of(self, machine: str) -> int:
        """Return how many batches of this machine's workers the broker has accepted, as they noted on its disk."""
        scratch = self.shared / f"disk-{machine}"
        paths = [path for folder in scratch.rglob("recorders") for _, path in recorders_in(folder)]
        return sum(reading.accepted for path in paths if (reading := read_recorder(path)) is not None)

    def await_batches_of(self, machine: str, what: str) -> None:
        before = self.accepted_of(machine)
        wait_until(lambda: self.accepted_of(machine) > before, f"batches of {machine} {what}")

    def await_joined(self, machine: str) -> None:
        """Wait until the worker of `machine` is one of the fleet. Steps may be those of another one."""
        logs = self.shared / f"disk-{machine}"
        joined = "joined fleet"
        wait_until(lambda: any(joined in log.read_text() for log in logs.rglob("*.log")), f"{machine} to join")

    def ask(self, machine: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command that reads the fleet's Redis, which is on loopback of the head's `machine`."""
        words = (sys.executable, "-m", "headrace.deploy", *arguments)
        command = self.machines.command(machine, *words)
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)

    def await_lost(self, expected: bool) -> None:
        """Wait until the first broker has let go of a worker, or knows all of them."""
        lost = "its connection ended without a word"
        what = "a lost worker" if expected else "no lost worker"
        wait_until(
            lambda: (lost in self.ask("head", "why", "--run-dir", str(self.run_dir)).stdout) == expected,
            what,
            pause_s=0.5,
        )

    def audit(self) -> subprocess.CompletedProcess[str]:
        return self.ask("second", "audit", "--strict", "--run-dir", str(self.run_dir))

    def assert_exact(self, machine: str) -> None:
        """Assert that the books balance, and that all their sources agree."""
        for more in (("--strict", "--run-dir", str(self.run_dir)), ("--deep", str(self.run_dir))):
            audited = self.ask(machine, "audit", *more)
            assert audited.returncode == 0, audited.stdout + audited.stderr

    def published(self) -> str:
        return Rendezvous(self.meet).find("worker")


@pytest.mark.thorough
def test_books_stay_exact_as_hosts_are_lost_and_added_and_the_broker_moves(machines: Machines, tmp_path: Path) -> None:
    with ExitStack() as stack:
        hosts = Hosts(machines, tmp_path, stack)
        one = hosts.workers("one", *REMOTE, f"worker.advertise={machines.address('one')}")
        two = hosts.workers("two")
        envs = hosts.role("envs", "env-host", *ENVS)
        learner = hosts.role("learner", "learner", "--run-dir", str(hosts.run_dir))
        head = hosts.fleet("head")
        for machine in ("one", "two"):
            hosts.await_joined(machine)
            hosts.await_batches_of(machine, "which came before its fleet")

        machines.connect("one", connected=False)  # from its env host too
        hosts.await_progress("while one host is cut off")
        hosts.await_lost(True)
        machines.connect("one", connected=True)
        hosts.await_lost(False)
        hosts.await_batches_of("one", "as it is back")
        machines.connect("two", connected=False)  # for ever
        hosts.await_lost(True)
        three = hosts.workers("three")  # it takes the slot that is free
        hosts.await_lost(False)
        hosts.await_batches_of("three", "which was added")

        stop_all(hosts, head)
        head = hosts.fleet("second")
        wait_until(lambda: machines.address("second") in hosts.published(), "the broker's new address")
        hosts.await_progress("after the broker has moved to another host")
        for machine in ("one", "three"):
            hosts.await_batches_of(machine, "after the broker has moved to another host")
        groups = (one, three)
        assert [process.poll() for process in (*groups, learner, envs)] == [None] * 4, "they have followed the broker"
        hosts.end(*groups)
        hosts.end(envs)
        # A newer worker has the slot of the lost host's. The broker closes the books of that life a minute later.
        wait_until(lambda: hosts.is_told("no supervisor has told of its end"), "the broker to close books", pause_s=0.5)
        wait_until(lambda: "claims to be live" not in hosts.audit().stdout, "the books of the lost host", pause_s=2.0)
        two.kill()
        hosts.end(learner)
        hosts.end(head)
        hosts.assert_exact("second")


@pytest.mark.thorough
def test_peers_follow_a_broker_and_a_worker_whose_names_move_to_other_machines(
    machines: Machines, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        hosts = Hosts(machines, tmp_path, stack, "dns://broker")
        machines.point("broker", "head")
        machines.point("worker", "one")
        one = hosts.workers("one", *BY_NAME, *REMOTE)
        to_worker = ("--slot", str(FIRST_FROM_ELSEWHERE), "--rendezvous", "dns://worker")
        envs = hosts.role("envs", "env-host", *ENVS, *as_options(*BY_NAME), *to_worker)
        learner = hosts.role("learner", "learner", "--run-dir", str(hosts.run_dir), *as_options(*BY_NAME))
        head = hosts.fleet("head", *BY_NAME)
        hosts.await_batches_of("one", "with envs elsewhere")  # so it has the first slot
        two = hosts.workers("two", *BY_NAME)
        hosts.await_batches_of("two", "of its own envs")

        hosts.end(head)
        machines.point("broker", "second")
        second = hosts.fleet("second", *BY_NAME)
        hosts.await_batches_of("one", "after the broker was moved")
        hosts.await_batches_of("two", "after the broker was moved")

        machines.connect("second", connected=False)  # a machine that is off closes no connection
        stop_all(hosts, second)
        machines.point("broker", "head")
        head = hosts.fleet("head", *BY_NAME)
        hosts.await_batches_of("one", "after the broker's machine was lost")
        hosts.await_batches_of("two", "after the broker's machine was lost")

        hosts.end(one)
        machines.point("worker", "three")
        three = hosts.workers("three", *BY_NAME, *REMOTE)
        hosts.await_batches_of("three", "which has the name of the worker now")

        assert [process.poll() for process in (learner, envs)] == [None] * 2, "they have followed the names"
        hosts.end(two, three)
        hosts.end(envs)
        hosts.end(learner)
        hosts.end(head)
        hosts.assert_exact("head")


def as_options(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def stop_all(hosts: Hosts, head: subprocess.Popen[bytes]) -> None:
    """Kill a whole machine's part of the fleet at once, as a power loss would."""
    pids = [process.pid for process in read_fleet_file(hosts.run_dir / "fleet.json").processes]
    head.kill()
    for pid in pids:
        subprocess.run(["kill", "-9", str(pid)], capture_output=True, check=False)
    head.wait(TIMEOUT_S)
