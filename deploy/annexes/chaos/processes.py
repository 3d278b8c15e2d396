"""The processes of a trial: `headrace up`, a recording learner, and a worker that came from elsewhere.

The trial restarts these processes when they end. `headrace up` keeps its run directory over a restart.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from headrace.deploy.annexes.chaos.relay import Relay
from headrace.deploy.annexes.chaos.schedule import ELSEWHERE
from headrace.deploy.process.child import last_line
from headrace.deploy.process.child_environment import child_environment
from headrace.deploy.process.fork_server import HEADRACE
from headrace.deploy.process.proc_stat import parent_of
from headrace.deploy.run.fleet_file import FleetFile, read_fleet_file
from headrace.schemas.basics.run_files import endpoint_in
from headrace.schemas.errors import RunDirError

STOP_S = 60.0
_PAUSE_S = 0.5
"""Between two lives of a process that the trial starts itself."""


class Folders:
    """The folder of a trial, and the paths in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.fleet = root / "fleet"
        """The run directory of the fleet."""
        self.truth = root / "truth"
        """The files with a byte a step."""
        self.record = root / "record"
        self.logs = root / "logs"
        self.config = root / "config.json"


@dataclass
class OwnProcess:
    """A process that the trial keeps alive: its command, and its present life."""

    name: str
    command: Callable[[], list[str]]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    lives: int = 0
    _start_at: float = 0.0

    def tend(self) -> int | None:
        """Start the process if it does not run. Return the exit code of a life that has just ended, else None."""
        returncode = None
        if self.process is not None and (returncode := self.process.poll()) is not None:
            self.process = None
            self._start_at = time.monotonic() + _PAUSE_S
        if self.process is None and time.monotonic() >= self._start_at:
            self.start()
        return returncode

    def start(self) -> None:
        """Start the process again."""
        self.lives += 1
        with self.log.open("ab") as log, self.log.with_suffix(".out").open("ab") as out:
            self.process = subprocess.Popen(
                self.command(), stdin=subprocess.DEVNULL, stdout=out, stderr=log, env=child_environment(1)
            )

    @property
    def pid(self) -> int | None:
        """Return the pid of the process; None while it does not run."""
        return self.process.pid if self.process is not None and self.process.poll() is None else None

    def stop(self, deadline_s: float = STOP_S) -> int:
        """Send SIGTERM and wait; SIGKILL after the deadline. Return the exit code, 0 when it did not run."""
        if self.process is None:
            return 0
        self._send(signal.SIGCONT)
        self._send(signal.SIGTERM)
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self.kill()
            return self.process.wait()

    def kill(self) -> None:
        """Send SIGKILL, and wait for the end."""
        if self.process is not None:
            self._send(signal.SIGKILL)
            self.process.wait()

    def _send(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def last_line(self) -> str:
        """Return the last line that the process wrote to stderr."""
        return last_line(self.log)


class FleetProcesses:
    """The processes of the fleet, and those that join it, with the links through which the latter reach the broker."""

    def __init__(self, folders: Folders) -> None:
        self.folders = folders
        self.links = {
            "learner": Relay(lambda: self.address("learner")),
            ELSEWHERE: Relay(lambda: self.address("worker")),
        }
        run_dir, config = str(folders.fleet), str(folders.config)

        def join() -> list[str]:
            own = [*HEADRACE, "worker", "--config", str(folders.fleet / "config.json"), "--run-dir", run_dir]
            return [*own, "--endpoint", self.links[ELSEWHERE].endpoint, "--fleet-id", self.page().fleet_id]

        up = [*HEADRACE, "up", "--config", config, "--run-dir", run_dir, "--json"]
        learner = [sys.executable, "-m", "headrace.deploy.annexes.chaos.recorder"]
        learner += [self.links["learner"].endpoint, str(folders.record), run_dir]
        self.up = OwnProcess("supervisor", lambda: up, folders.logs / "up.log")
        self.learner = OwnProcess("learner", lambda: learner, folders.logs / "learner.log")
        self.elsewhere = OwnProcess("worker-elsewhere", join, folders.logs / "worker-elsewhere.log")
        self.own = (self.up, self.learner, self.elsewhere)

    def page(self) -> FleetFile:
        """Return fleet.json, or an empty one while there is none."""
        try:
            return read_fleet_file(self.folders.fleet / "fleet.json")
        except RunDirError:
            return FleetFile(fleet_id="")

    def pid(self, name: str) -> int | None:
        """Return the pid of a target; None while it does not run."""
        for own in self.own:
            if own.name == name:
                return own.pid
        if self.up.pid is None:
            return None
        found = next((process.pid for process in self.page().processes if process.name == name), None)
        # The fork server's children are grandchildren. Another program may have got the pid by now.
        is_own = found is not None and self.up.pid in (parent_of(found), parent_of(parent_of(found)))
        return found if is_own else None

    def address(self, role: str) -> str:
        """Return the address at which the broker serves this role; "" while it does not serve."""
        return endpoint_in(self.folders.fleet, role)

    def summary(self) -> dict[str, Any]:
        """Return the JSON that the last life of `up` printed; empty if it printed none."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            found: Any = orjson.loads(self.up.log.with_suffix(".out").read_bytes().splitlines()[-1])
            return found if isinstance(found, dict) else {}
        return {}

    def close(self) -> None:
        """Kill what still runs, and close the links. The fleet's processes end with their supervisor."""
        for own in self.own:
            own.kill()
        for link in self.links.values():
            link.close()


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal, if there is such a process."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
