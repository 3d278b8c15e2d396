"""A real `headrace up` in a process of its own, to be hurt from outside and judged by its books."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from headrace.deploy.run.fleet_file import read_fleet_file
from headrace.deploy.run.redis_server import prepare_redis, wait_ready
from headrace.deploy.run.redis_view import FleetView, Snapshot
from headrace.schemas.errors import HeadraceError
from support.waiting import TIMEOUT_S, wait_until

_PAUSE_S = 0.1
"""To ask Redis how far a fleet is takes 2 ms of CPU time here, and more in the server."""


@contextlib.contextmanager
def redis_in(folder: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A Redis server that is no part of the fleet; yields its URL and its process."""
    launch = prepare_redis(folder)
    server = subprocess.Popen(launch.argv, stdout=subprocess.DEVNULL)
    try:
        wait_ready(launch.url, 60.0)
        yield launch.url, server
    finally:
        server.kill()
        server.wait()


class RunningFleet:
    """`headrace up --json` with `arguments`; use as a context manager, so that nothing of it outlives a failed test.

    `up` has the words of the command, where it is another one that starts a fleet. `place` names the run directory.
    """

    def __init__(
        self,
        run_dir: Path,
        *arguments: str,
        cwd: Path | None = None,
        up: Sequence[str] = ("up",),
        place: str = "--run-dir",
    ) -> None:
        self.run_dir = run_dir
        self._view: FleetView | None = None
        self._read_at: tuple[str, str] | None = None
        """The URL and fleet id of `_view`, which is kept: a connection costs more than what is asked by it."""
        self._words = os.memfd_create("stderr")
        command = [sys.executable, "-m", "headrace.deploy", *up, "--json", place, str(run_dir)]
        self._process = subprocess.Popen(
            [*command, "--seed", "0", "--timeout-s", "240", *arguments],
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=self._words,
            text=True,
        )

    def __enter__(self) -> RunningFleet:
        return self

    def __exit__(self, *error: object) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.communicate(timeout=TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.communicate()
        assert self._process.stdout is not None
        self._process.stdout.close()  # nobody has read it if the fleet ended before a test wanted it to
        self._close_view()
        os.close(self._words)

    def said(self) -> str:
        """Return the text that it has written to stderr so far."""
        return os.pread(self._words, 1 << 24, 0).decode(errors="replace")

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        """Return once `condition()` is true; a fleet that ended before is a failure that shows its words."""

        def met() -> bool:
            if condition():
                return True
            assert self._process.poll() is None, f"the fleet ended before {what}:\n{self.said()}"
            return False

        wait_until(met, what, pause_s=_PAUSE_S)

    def pid(self, role: str, slot: int | None = None, incarnation: int | None = None) -> int | None:
        """The process of this role as fleet.json has it."""
        for process in self._processes():
            if process.role == role and slot in (None, process.slot) and incarnation in (None, process.incarnation):
                return process.pid
        return None

    def send(self, number: signal.Signals, role: str, slot: int | None = None) -> int:
        """Send a real signal to a process that this fleet started; returns its pid."""
        pid = self.pid(role, slot)
        assert pid is not None, f"no {role} runs"
        os.kill(pid, number)
        return pid

    def endpoint(self, role: str) -> str:
        """Where a role connects."""
        page = orjson.loads((self.run_dir / "broker.json").read_bytes())
        return str(page["endpoints"][role])

    def snapshot(self) -> Snapshot | None:
        """Return the fleet's state in Redis; None while Redis does not answer."""
        try:
            page = read_fleet_file(self.run_dir / "fleet.json")
            place = (page.redis_url, page.fleet_id)
            if self._view is None or place != self._read_at:
                self._close_view()
                self._view, self._read_at = FleetView(*place), place
            return self._view.read()
        except (HeadraceError, OSError):
            self._close_view()
            return None

    def _close_view(self) -> None:
        if self._view is not None:
            self._view.close()
            self._view = None

    def steps(self) -> int:
        """Return the agent steps that the broker has accepted, as Redis has them; 0 while it does not answer."""
        snapshot = self.snapshot()
        return snapshot.totals.get("accepted_agent_steps_total", 0) if snapshot else 0

    def steps_of_envs(self) -> int:
        """Return the env steps, as Redis has them; 0 while it does not answer."""
        snapshot = self.snapshot()
        return snapshot.totals.get("env_steps_total", 0) if snapshot else 0

    def wait_for_steps(self, count: int) -> None:
        """Wait until the broker has accepted more than `count` agent steps from now on, as Redis has them."""
        before = self.steps()
        self.wait_until(lambda: self.steps() > before + count, f"{count:,} steps more")

    def terminate(self) -> None:
        """SIGTERM: drain and end."""
        self._process.terminate()

    def kill(self) -> None:
        """SIGKILL of the supervisor; its processes end by themselves."""
        self._process.kill()
        self._process.communicate()

    def kill_everything(self) -> None:
        """SIGKILL of every process at once, whatever stands still."""
        for pid in (self._process.pid, *(process.pid for process in self._processes())):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.communicate()

    def finish(self, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
        """Wait for the end; its JSON, with the exit code and what it said added."""
        output, _ = self._process.communicate(timeout=timeout_s)
        result: dict[str, Any] = orjson.loads(output)
        return result | {"returncode": self._process.returncode, "stderr": self.said()}

    def audit(self, *options: str) -> subprocess.CompletedProcess[str]:
        """`headrace audit --strict` of its run directory."""
        return audit_of(self.run_dir, *options)

    def deep_audit(self) -> subprocess.CompletedProcess[str]:
        """`headrace audit --deep` of its run directory."""
        return deep_audit_of(self.run_dir)

    def audited(self) -> dict[str, Any]:
        """The JSON of an audit that must find nothing wrong."""
        audit = self.audit("--json")
        assert audit.returncode == 0, audit.stdout + audit.stderr
        result: dict[str, Any] = orjson.loads(audit.stdout)
        return result

    def _processes(self) -> list[Any]:
        try:
            return list(read_fleet_file(self.run_dir / "fleet.json").processes)
        except (HeadraceError, OSError):
            return []


def snapshot_of(run_dir: Path) -> Snapshot | None:
    """Return the state in Redis of the fleet in `run_dir`; None while there is none, or Redis does not answer."""
    try:
        page = read_fleet_file(run_dir / "fleet.json")
        with FleetView(page.redis_url, page.fleet_id) as view:
            return view.read()
    except (HeadraceError, OSError):
        return None


def audit_of(run_dir: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """`headrace audit --strict` of `run_dir`."""
    command = [sys.executable, "-m", "headrace.deploy", "audit", "--strict", "--run-dir", str(run_dir), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)


def deep_audit_of(run_dir: Path) -> subprocess.CompletedProcess[str]:
    """`headrace audit --deep` of `run_dir`."""
    command = [sys.executable, "-m", "headrace.deploy", "audit", "--deep", str(run_dir)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
