"""Slurm's commands, as this user: submit, list, stop. Each call has a deadline and raises `FleetError`."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from headrace.deploy.process.child_environment import without_settings
from headrace.deploy.process.fleet_errors import slurm_error

CALL_S = 60.0
_FORMAT = "%i|%F|%K|%j|%T|%M|%N|%r"
_SUBMITTED = re.compile(r"(\d{1,18})(;.*)?")
_PENDING = "PENDING"
_AT_ONCE = 500
"""Jobs that one call of scancel names."""
_ENDING = "COMPLETING"
_OVER = frozenset(
    (
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED"),
        *("NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
    )
)


_ADVICE = {
    "contact|connect|timed out|configuration source": "ask with `scontrol ping` whether the controller answers, "
    "and try again",
    "partition": 'name one that `sinfo` shows: slurm.options = ["--partition=NAME"]',
    "account": 'name one of yours: slurm.options = ["--account=NAME"]; `sacctmgr show assoc user=$USER` lists them',
    "job array": "ask for fewer tasks: `scontrol show config` tells MaxArraySize",
    "qos|limit": "ask for less: slurm.worker_tasks, or --time and --cpus-per-task in the options of [slurm]",
    "node configuration|cpu count|memory specification": "ask for what one node has: `sinfo --Node --long` shows it",
}
"""Pattern in what Slurm says -> what to do."""


@dataclass(frozen=True)
class ClusterTask:
    """A job, or one task of an array, as the controller has it. A task that has not started may lack a node."""

    job: str
    """The id as scancel takes it: "12", or "13_4" for a task."""
    base: int
    """The id of the job, or of the array."""
    index: int
    """The number in the array; -1 for a job that is none."""
    name: str
    state: str
    elapsed: str
    node: str
    reason: str

    @property
    def is_over(self) -> bool:
        """Return whether the task has ended and holds no node."""
        return self.state in _OVER

    @property
    def is_pending(self) -> bool:
        """Return whether the task has not started."""
        return self.state == _PENDING

    @property
    def counts(self) -> bool:
        """Return whether the task runs or will run."""
        return not self.is_over and self.state != _ENDING


def submit(line: Sequence[str]) -> int:
    """Submit a job by this command line of sbatch, and return its id."""
    said = call(line).strip().splitlines()
    matched = _SUBMITTED.fullmatch(said[-1]) if said else None
    if matched is None:
        raise slurm_error(shlex.join(line), f"it named no job ({' '.join(said)!r:.200})", "look with `squeue --me`")
    return int(matched[1])


def tasks_of(bases: Collection[int], name: str) -> list[ClusterTask]:
    """Return this user's jobs and array tasks with these ids, whose names begin with `name`.

    A controller that loses its state reuses ids, so an id alone may belong to another job.
    """
    said = call(["squeue", "--me", "--noheader", "--array", "--states=all", f"--format={_FORMAT}"])
    found = [_task(line) for line in said.splitlines() if line.count("|") >= _FORMAT.count("|")]
    return [task for task in found if task.base in bases and task.name.startswith(name)]


def _task(line: str) -> ClusterTask:
    job, base, index, name, state, elapsed, node, reason = line.split("|", 7)
    return ClusterTask(job, _number(base), _number(index), name, state, elapsed, node, reason)


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else -1


def stop(tasks: Sequence[ClusterTask]) -> None:
    """Cancel tasks that have not started. Send the others SIGTERM, so that they drain and end.

    Only the script of a job gets the signal. Without --batch, each process of the job would get it.
    """
    _cancel([task.job for task in tasks if task.is_pending])
    _cancel([task.job for task in tasks if not task.is_pending], "--batch", "--signal=TERM")


def end(tasks: Sequence[ClusterTask]) -> None:
    """Cancel tasks: each of their processes gets SIGTERM, and SIGKILL after Slurm's `KillWait`."""
    _cancel([task.job for task in tasks])


def _cancel(jobs: Sequence[str], *options: str) -> None:
    for first in range(0, len(jobs), _AT_ONCE):
        call(["scancel", "--quiet", *options, *jobs[first : first + _AT_ONCE]])


def call(line: Sequence[str]) -> str:
    """Run one of Slurm's commands and return its output. Raises `FleetError` with its full error message."""
    try:
        done = subprocess.run(
            line, capture_output=True, text=True, errors="replace", timeout=CALL_S, check=False, env=without_settings()
        )
    except FileNotFoundError as error:
        advice = "run this where Slurm's commands are, such as a login node of the cluster"
        raise slurm_error(shlex.join(line), f"{line[0]} is not on PATH", advice) from error
    except subprocess.TimeoutExpired as error:
        raise slurm_error(shlex.join(line), f"no answer within {CALL_S:g} s", _advice("contact")) from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
        raise slurm_error(shlex.join(line), said, _advice(said))
    return done.stdout


def _advice(said: str) -> str:
    """Return what to do about an error of Slurm's commands."""
    for words, advice in _ADVICE.items():
        if re.search(words, said, re.IGNORECASE):
            return advice
    return "correct the options in [slurm]; `headrace slurm up --dry-run` shows the lines"
