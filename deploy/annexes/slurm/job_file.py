"""`RUN/slurm`, the files of `headrace slurm` about a fleet: the settings for its jobs, their ids, their output."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace.deploy.process.fleet_errors import slurm_error
from headrace.deploy.run.run_dir import write_private
from headrace.schemas.basics.run_files import open_own
from headrace.schemas.errors import RunDirError, writing

_JobId = Annotated[int, Field(gt=0, lt=1 << 32)]
_MOST_ARRAYS = 100_000
LOCK_S, _LOOK_S = 30.0, 0.2


class JobFile(BaseModel):
    """The content of jobs.json: the jobs of a fleet that are not known to be over."""

    model_config = ConfigDict(extra="ignore")
    name: str = Field(max_length=200)
    """The beginning of the name of each job."""
    head: _JobId | None = None
    workers: list[_JobId] = Field(default=[], max_length=_MOST_ARRAYS)
    env_hosts: list[_JobId] = Field(default=[], max_length=_MOST_ARRAYS)
    worker_tasks: int = Field(default=0, ge=0)
    env_host_tasks: int = Field(default=0, ge=0)

    @property
    def ids(self) -> set[int]:
        """Return the ids of all jobs and arrays."""
        return {*self.workers, *self.env_hosts, *([self.head] if self.head is not None else [])}


def settings_file(run_dir: Path) -> Path:
    """Return the path of the settings that the jobs read."""
    return run_dir / "slurm" / "settings.json"


def write_jobs(run_dir: Path, jobs: JobFile) -> None:
    """Replace the file in one step."""
    write_private(_jobs_json(run_dir), orjson.dumps(jobs.model_dump(), option=orjson.OPT_INDENT_2))


def read_jobs(run_dir: Path) -> JobFile:
    """Return the jobs of the fleet in `run_dir`. Raises `RunDirError` where it was not started by `headrace slurm`."""
    path = _jobs_json(run_dir)
    try:
        return JobFile.model_validate_json(path.read_bytes())
    except OSError as error:
        reason = f"{path} cannot be read ({error.strerror})"
        raise RunDirError(str(run_dir), reason, "name a run that `headrace slurm up` has started") from error
    except ValidationError as error:
        raise RunDirError(str(run_dir), f"{path} is damaged ({error.errors()[0]['msg']})") from error


@contextmanager
def jobs_locked(run_dir: Path) -> Iterator[None]:
    """Keep other commands of `headrace slurm` out of this run. Raises `FleetError` if one holds the lock too long."""
    folder = run_dir / "slurm"
    with writing(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = open_own(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        deadline = time.monotonic() + LOCK_S
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if time.monotonic() > deadline:
                reason = f"another `headrace slurm` has changed its jobs for {LOCK_S:g} s"
                raise slurm_error(f"the jobs of {run_dir}", reason, "try again when it is done")
            time.sleep(_LOOK_S)
        yield
    finally:
        os.close(lock)


def _jobs_json(run_dir: Path) -> Path:
    return run_dir / "slurm" / "jobs.json"
