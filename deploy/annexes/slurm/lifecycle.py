"""A fleet's jobs from the first submission to the last: `up`, `scale`, `down`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import orjson

from headrace.broker.files.rendezvous_file import note_stopped
from headrace.deploy.annexes.slurm.job_file import JobFile, jobs_locked, read_jobs, settings_file, write_jobs
from headrace.deploy.annexes.slurm.scheduler import ClusterTask, end, stop, submit, tasks_of
from headrace.deploy.annexes.slurm.submission import FleetPart, for_cluster, job_prefix, sbatch_line
from headrace.deploy.process.fleet_errors import FleetError, slurm_error
from headrace.deploy.run.key_pairs import ensure_keys
from headrace.deploy.run.resume import EarlierRun
from headrace.deploy.run.run_dir import RunDir, new_run_dir
from headrace.deploy.run.seal import write_sealed
from headrace.schemas.basics.printable import to_paste
from headrace.schemas.basics.run_files import RENDEZVOUS_FILE, read_object
from headrace.schemas.errors import RunDirError, is_there
from headrace.schemas.settings.config import FleetConfig
from headrace.schemas.settings.config_loading import load_config

WORKERS_DRAIN_S, HEAD_DRAIN_S = 60.0, 120.0
"""Seconds that workers, and then the head, have to drain before `down` takes away their nodes."""
LEAVE_S = 5.0
"""Seconds in which workers leave with a fleet that has stopped, without being told."""
KILL_S = 60.0
"""Seconds in which Slurm kills what has not drained."""
_LOOK_S, _SAY_S = 0.5, 10.0

Say = Callable[[str], None]


def run_dir_of(config: FleetConfig) -> Path:
    """Return the absolute path of the run directory that `up` uses."""
    return (Path(config.fleet.run_dir) if config.fleet.run_dir else new_run_dir(config.sampling.env)).absolute()


def dry_run(config: FleetConfig) -> list[list[str]]:
    """Return the command lines with which `up` would submit the fleet. Write nothing."""
    run_dir = run_dir_of(config)
    ready = for_cluster(config, run_dir)
    sizes = {FleetPart.WORKERS: ready.slurm.worker_tasks, FleetPart.ENV_HOSTS: ready.slurm.env_host_tasks}
    arrays = [(part, tasks) for part, tasks in sizes.items() if tasks]
    lines = [sbatch_line(part, ready, run_dir, tasks=tasks, after="HEAD_JOB_ID") for part, tasks in arrays]
    return [sbatch_line(FleetPart.HEAD, ready, run_dir), *lines]


def prepare(config: FleetConfig) -> tuple[FleetConfig, Path]:
    """Write the jobs' files: settings, and keys if the user names none. Return (settings, run directory)."""
    run_dir = run_dir_of(config)
    ready = for_cluster(config, run_dir)
    with jobs_locked(run_dir):
        _refuse_a_second(run_dir)
        if (earlier := EarlierRun.of(RunDir(run_dir))) is not None:  # here instead of in the head job
            advice = "give the run its own settings again, or name a new run directory with --run-dir"
            earlier.check(ready, resume=False, advice=advice)
        (run_dir / RENDEZVOUS_FILE).unlink(missing_ok=True)  # an earlier fleet's: tasks would leave with it
        if not config.keys.dir and ready.keys.dir:
            ensure_keys(Path(ready.keys.dir))
        write_sealed(settings_file(run_dir), orjson.dumps(ready.model_dump(mode="json")))
        slurm = ready.slurm
        asked = {"worker_tasks": slurm.worker_tasks, "env_host_tasks": slurm.env_host_tasks}
        write_jobs(run_dir, JobFile(name=job_prefix(run_dir), **asked))
    return ready, run_dir


def up(config: FleetConfig) -> tuple[Path, JobFile]:
    """Submit a fleet, and return its run directory and jobs. If Slurm refuses a part, cancel the submitted parts."""
    ready, run_dir = prepare(config)
    with jobs_locked(run_dir):
        jobs = read_jobs(run_dir)
        try:
            jobs.head = submit(sbatch_line(FleetPart.HEAD, ready, run_dir))
            _submit_missing(jobs, ready, run_dir, [])
        except FleetError:
            end([task for task in _tasks(jobs) if not task.is_over])
            raise
        finally:
            write_jobs(run_dir, jobs)
    return run_dir, jobs


def _submit_missing(jobs: JobFile, config: FleetConfig, run_dir: Path, tasks: Sequence[ClusterTask]) -> None:
    """Submit the worker tasks and env hosts that are asked for and are not among `tasks`. Note their arrays."""
    for part, arrays, wanted in (
        (FleetPart.WORKERS, jobs.workers, jobs.worker_tasks),
        (FleetPart.ENV_HOSTS, jobs.env_hosts, jobs.env_host_tasks),
    ):
        missing = wanted - sum(task.base in arrays and task.counts for task in tasks)
        if missing > 0:
            arrays.append(submit(sbatch_line(part, config, run_dir, tasks=missing, after=str(jobs.head))))


def _refuse_a_second(run_dir: Path) -> None:
    """Raise `RunDirError` where jobs of this run are still there."""
    if not is_there(run_dir / "slurm" / "jobs.json"):
        return
    left = [task.job for task in _tasks(read_jobs(run_dir)) if not task.is_over]
    if left:
        advice = f"end them with `headrace slurm down --run-dir {to_paste(run_dir)}`, or choose another run directory"
        raise RunDirError(str(run_dir), f"its jobs are still there ({', '.join(left[:5])})", advice)


def _tasks(jobs: JobFile) -> list[ClusterTask]:
    return tasks_of(jobs.ids, jobs.name) if jobs.ids else []


def scale(run_dir: Path, wanted: int | None) -> tuple[int, int]:
    """Submit or stop worker tasks until there are `wanted`; None: as many as were asked for last.

    Env hosts that have ended are submitted again too. Return how many worker tasks there were, and how many there are
    to be. Raises `RunDirError` where the head job has ended.
    """
    config, _ = load_config(settings_file(run_dir), {})
    with jobs_locked(run_dir):
        jobs = read_jobs(run_dir)
        tasks = _tasks(jobs)
        if not any(task.base == jobs.head and not task.is_over for task in tasks):
            again = f"start it again with `headrace slurm up --run-dir {to_paste(run_dir)}` and its fleet.toml"
            raise RunDirError(str(run_dir), "its head job has ended", again)
        jobs.worker_tasks = jobs.worker_tasks if wanted is None else wanted
        there = [task for task in tasks if task.base in jobs.workers and task.counts]
        known = {task.base for task in tasks if not task.is_over}
        jobs.workers = [array for array in jobs.workers if array in known]
        jobs.env_hosts = [array for array in jobs.env_hosts if array in known]
        try:
            _submit_missing(jobs, config, run_dir, tasks)
            # First those that have not started, then the newest.
            there.sort(key=lambda task: (not task.is_pending, -task.base, -task.index))
            stop(there[: max(0, len(there) - jobs.worker_tasks)])
        finally:
            write_jobs(run_dir, jobs)
    return len(there), jobs.worker_tasks


def down(run_dir: Path, say: Say) -> None:
    """End the fleet's jobs, and return once their nodes are free: first workers and env hosts, then the head.

    Leave the job of this process alone, since its end would end this process too. Kill jobs that do not drain in time.
    The wanted number of tasks is set to 0 first, so no other command submits tasks meanwhile.
    """
    with jobs_locked(run_dir):
        jobs = read_jobs(run_dir).model_copy(update={"worker_tasks": 0, "env_host_tasks": 0})
        write_jobs(run_dir, jobs)
    own = os.environ.get("SLURM_JOB_ID", "")
    if own == str(jobs.head):  # the head job's script runs this after `headrace up` has ended or was killed
        note_stopped(run_dir / RENDEZVOUS_FILE)

    def left(head: bool) -> list[ClusterTask]:
        tasks = [task for task in _tasks(jobs) if (task.base == jobs.head) is head and not task.is_over]
        return [task for task in tasks if own not in (task.job, str(task.base))]

    stop([task for task in left(False) if task.is_pending])
    if read_object(run_dir / RENDEZVOUS_FILE).get("state") == "stopped":  # the workers then leave by themselves
        _gone(lambda: [task for task in left(False) if task.base in jobs.workers], LEAVE_S, say)
    for limit_s, still in ((WORKERS_DRAIN_S, partial(left, False)), (HEAD_DRAIN_S, partial(left, True))):
        stop([task for task in still() if task.counts])
        if not _gone(still, limit_s, say):
            end(still())
            if not _gone(still, KILL_S, say):
                names = " ".join(task.job for task in still())
                raise slurm_error(f"scancel {names}", "these jobs do not end", "ask the cluster's administrators")


def _gone(left: Callable[[], list[ClusterTask]], deadline_s: float, say: Say) -> bool:
    """Wait until no task is left, and report the remaining ones every 10 s. Return False at the deadline."""
    began, say_at = time.monotonic(), _SAY_S
    while tasks := left():
        waited_s = time.monotonic() - began
        if waited_s >= deadline_s:
            return False
        if waited_s >= say_at:
            say_at += _SAY_S
            names = ", ".join(f"{task.job} {task.state}" for task in tasks[:5])
            say(
                f"waiting for {len(tasks)} of its jobs to end: {names} ({waited_s:.0f} s of at most {deadline_s:.0f} s)"
            )
        time.sleep(_LOOK_S)
    return True
