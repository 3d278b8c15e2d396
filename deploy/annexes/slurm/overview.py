"""The table of `headrace slurm status`: a fleet's jobs beside its own state, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from headrace.deploy.annexes.slurm.job_file import JobFile, read_jobs
from headrace.deploy.annexes.slurm.scheduler import ClusterTask, tasks_of
from headrace.deploy.run.fleet_file import FleetFile, read_fleet_file
from headrace.schemas.basics.printable import to_paste

_NEVER = "DependencyNeverSatisfied"
_SHOWN = 5


@dataclass(frozen=True)
class Overview:
    """A fleet of Slurm at one moment. `fleet` is None before its head has begun."""

    run_dir: Path
    jobs: JobFile
    tasks: list[ClusterTask]
    fleet: FleetFile | None

    @property
    def arrays(self) -> list[ClusterTask]:
        """Return the array tasks that hold a node or wait for one."""
        return [task for task in self.tasks if task.base != self.jobs.head and not task.is_over]

    def findings(self) -> Iterator[str]:
        """Yield a sentence for each thing that is wrong, with what to do."""
        head = next((task for task in self.tasks if task.base == self.jobs.head), None)
        down = f"headrace slurm down --run-dir {to_paste(self.run_dir)}"
        if head is None or head.is_over:
            end = "is no longer known to Slurm" if head is None else f"has ended ({head.state}, {head.reason})"
            if self.arrays:
                yield f"the head job {end}, and {_named(self.arrays)} are still there: {down}"
            elif self.fleet is None or self.fleet.state != "stopped":
                yield f"the head job {end} before the fleet was stopped: look at {self.run_dir}/slurm"
            return
        lost = [task for task in self.arrays if _NEVER in task.reason]
        if lost:
            yield f"{_named(lost)} will never start ({_NEVER}): {down}"
        asked = {"worker": (self.jobs.workers, self.jobs.worker_tasks)}
        asked["env host"] = (self.jobs.env_hosts, self.jobs.env_host_tasks)
        for what, (arrays, wanted) in asked.items():
            there = sum(task.base in arrays and task.counts for task in self.arrays)
            if there < wanted:
                logs = f"their last words are in {self.run_dir}/slurm"
                scale = f"headrace slurm scale --run-dir {to_paste(self.run_dir)}"
                yield f"{there} of {wanted} {what} tasks are there; {logs}; {scale} submits the others"

    def fleet_in_words(self) -> str:
        """Return the fleet's own state in one line."""
        if self.fleet is None:
            return "the head has not begun"
        best = "" if self.fleet.best_return is None else f", best mean return {self.fleet.best_return:.1f}"
        return f"fleet {self.fleet.fleet_id} is {self.fleet.state}: {self.fleet.env_steps:,} env steps{best}"


def overview_of(run_dir: Path) -> Overview:
    """Return the fleet in `run_dir` as it is now. Raises `RunDirError` and `FleetError`."""
    jobs = read_jobs(run_dir)
    path = run_dir / "fleet.json"
    fleet = read_fleet_file(path) if path.exists() else None
    return Overview(run_dir, jobs, tasks_of(jobs.ids, jobs.name), fleet)


def table(overview: Overview) -> Table:
    """Return a row for each job and task."""
    shown = Table("job", "name", "state", "time", "node", "reason", title=str(overview.run_dir))
    for task in overview.tasks:
        shown.add_row(task.job, task.name, task.state, task.elapsed, task.node, task.reason)
    return shown


def _named(tasks: list[ClusterTask]) -> str:
    more = f" and {len(tasks) - _SHOWN} more" if len(tasks) > _SHOWN else ""
    return f"job{'s' if len(tasks) > 1 else ''} {', '.join(task.job for task in tasks[:_SHOWN])}{more}"
