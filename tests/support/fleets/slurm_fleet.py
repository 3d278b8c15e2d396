"""A fleet on a Slurm of the tests: submitted by `headrace slurm up`, hurt from outside, and judged by its books."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from headrace.deploy.annexes.slurm.job_file import JobFile, read_jobs, write_jobs
from headrace.deploy.annexes.slurm.scheduler import ClusterTask, tasks_of
from headrace.deploy.annexes.slurm.submission import SCRIPTS
from headrace.deploy.run.fleet_file import read_fleet_file
from support.fleets.running_fleet import audit_of, deep_audit_of, snapshot_of
from support.slurm_cluster import SlurmCluster
from support.waiting import TIMEOUT_S, wait_until

_PAUSE_S = 0.2


class SlurmFleet:
    """A fleet in `run_dir`, with these settings in the file `toml`."""

    def __init__(self, cluster: SlurmCluster, run_dir: Path, toml: Path, settings: str) -> None:
        self.cluster = cluster
        self.run_dir = run_dir
        self.toml = toml
        toml.write_text(settings)

    def headrace(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command of Headrace where Slurm's commands reach the cluster."""
        command = [sys.executable, "-m", "headrace.deploy", *words]
        where, environment = self.toml.parent, self.cluster.environment
        return subprocess.run(
            command, cwd=where, env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
        )

    def sh(self, text: str) -> str:
        """Run a page's block for a shell, which must succeed, beside `toml`, and return what it says."""
        commands = f"{Path(sys.executable).parent}:{self.cluster.environment['PATH']}"
        done = subprocess.run(
            ["bash", "-ec", text],
            cwd=self.toml.parent,
            env={**self.cluster.environment, "PATH": commands},
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}{self.said()}"
        return done.stdout

    def up(self) -> None:
        """Submit it."""
        done = self.headrace("slurm", "up", str(self.toml), "--run-dir", str(self.run_dir))
        assert done.returncode == 0, done.stdout + done.stderr

    @contextmanager
    def topped_up(self) -> Iterator[None]:
        """Let the shipped script top up the workers within the block, in which the fleet must end."""
        command = [str(SCRIPTS / "top_up.sh"), str(self.run_dir), "1", str(Path(sys.executable).with_name("headrace"))]
        with self.topped_up_log.open("wb") as log:
            script = subprocess.Popen(command, env=self.cluster.environment, stdout=log, stderr=log)
        try:
            yield
            assert script.wait(TIMEOUT_S) == 0, self.said()
        finally:
            if script.poll() is None:
                script.kill()
                script.wait()

    @property
    def topped_up_log(self) -> Path:
        """The log of `topped_up`."""
        return self.run_dir / "slurm" / "top_up.log"

    @property
    def jobs(self) -> JobFile:
        return read_jobs(self.run_dir)

    @property
    def head(self) -> str:
        return str(self.jobs.head)

    def tasks(self, array: int = -1) -> list[str]:
        """Return the tasks of one of its worker arrays that are not over, as scancel takes them."""
        prefix = f"{self.jobs.workers[array]}_"
        return sorted(job for job in self.cluster.jobs() if job.startswith(prefix))

    def working(self) -> int:
        """Return how many lives of workers are open in the books, and have stepped."""
        snapshot = snapshot_of(self.run_dir)
        rows = snapshot.rows.values() if snapshot else ()
        return sum(not row.closed and row.totals.stepped > 0 for row in rows)

    def have_worked(self) -> int:
        """Return how many lives of workers are in the books, and have stepped."""
        snapshot = snapshot_of(self.run_dir)
        if snapshot is None:
            return 0
        return sum(row.totals.stepped > 0 for row in snapshot.rows.values()) + sum(
            lives.lives for lives in snapshot.folded.values()
        )

    def best_return(self) -> float:
        """Return the best mean return that the supervisor has noted; 0 before."""
        return read_fleet_file(self.run_dir / "fleet.json").best_return or 0.0

    def kill(self, role: str) -> None:
        """SIGKILL of a process of the head job; "up" is `headrace up` itself."""
        file = read_fleet_file(self.run_dir / "fleet.json")
        pids = {"up": file.supervisor_pid, **{process.role: process.pid for process in file.processes}}
        os.kill(pids[role], signal.SIGKILL)

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        """Return once `condition()` is true; a failure shows what the jobs have said."""
        try:
            wait_until(condition, what, pause_s=_PAUSE_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.said()}") from None

    def await_end(self) -> None:
        """Wait until none of its jobs holds a node or waits for one."""
        self.wait_until(lambda: not self.left(), "the end of its jobs")

    def said(self) -> str:
        """Return the end of what its jobs have printed."""
        logs = sorted((self.run_dir / "slurm").glob("*.log"))
        return "\n".join(f"== {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in logs)

    def note_jobs(self, head: int, array: int) -> None:
        """Note the jobs of a fleet that was submitted by hand."""
        write_jobs(self.run_dir, self.jobs.model_copy(update={"head": head, "workers": [array]}))

    def assert_books_are_exact(self) -> dict[str, Any]:
        """Check the books by both audits. Return the ledger as `headrace audit --json` shows it."""
        audit = audit_of(self.run_dir, "--json")
        assert audit.returncode == 0, audit.stdout + audit.stderr + self.said()
        deep = deep_audit_of(self.run_dir)
        assert deep.returncode == 0, deep.stdout + deep.stderr + self.said()
        found: dict[str, Any] = orjson.loads(audit.stdout)
        return found

    def assert_recorders_tell_the_rest(self, lives: int) -> None:
        """Check that the run directory has the recorders that the audit asks the next start to read."""
        audit = audit_of(self.run_dir)
        assert (
            audit.returncode,
            "the next `headrace up` in this run directory reads the recorder" in audit.stderr,
        ) == (1, True), audit
        assert audit.stderr.count("its worker has ended after") == lives, audit.stderr

    def left(self) -> list[str]:
        """Return its jobs and tasks that are not over."""
        return [task.job for task in self.all_tasks() if not task.is_over]

    def all_tasks(self) -> list[ClusterTask]:
        """Return its jobs and tasks as `headrace slurm` sees them, also those that are over."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SLURM_CONF", self.cluster.environment["SLURM_CONF"])
            return tasks_of(self.jobs.ids, self.jobs.name)
