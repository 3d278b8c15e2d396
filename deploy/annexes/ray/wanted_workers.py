"""`RUN_DIR/ray.json`: how many workers the run has on Ray. `headrace ray scale` replaces it."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, Field, ValidationError

from headrace.deploy.process.fleet_errors import scale_error
from headrace.deploy.process.proc_stat import is_alive
from headrace.deploy.run.fleet_file import read_fleet_file
from headrace.deploy.run.run_dir import write_private
from headrace.schemas.errors import RunDirError
from headrace.schemas.settings.config import MOST_WORKERS_ON_RAY


class WantedWorkers(BaseModel):
    """The content of the file."""

    workers: int = Field(ge=0, le=MOST_WORKERS_ON_RAY)


def write_wanted(run_dir: Path, workers: int) -> None:
    """Replace the file in one step."""
    write_private(run_dir / "ray.json", WantedWorkers(workers=workers).model_dump_json().encode())


def read_wanted(run_dir: Path) -> int:
    """Return the number in the file. Raises `RunDirError` where there is none to be read."""
    path = run_dir / "ray.json"
    try:
        return WantedWorkers.model_validate_json(path.read_bytes()).workers
    except (OSError, ValidationError) as error:
        raise RunDirError(str(run_dir), f"{path.name} does not say how many workers it has on Ray") from error


def scale_run(run_dir: Path, workers: int) -> int:
    """Have the run keep `workers` on Ray. Return how many it kept before.

    Raises `RunDirError` where no run is, and `FleetError` where it does not run, or keeps none on Ray.
    """
    fleet = read_fleet_file(run_dir / "fleet.json")
    if fleet.state != "running" or not is_alive(fleet.supervisor_pid):
        raise scale_error(f"the run in {run_dir} does not run (it is {fleet.state})", f"headrace up --resume {run_dir}")
    if "ray" not in {*(entry.name for entry in fleet.processes), *(entry.name for entry in fleet.waiting)}:
        raise scale_error(f"the run in {run_dir} keeps no workers on Ray", "start one with `headrace ray up`")
    before = read_wanted(run_dir)
    write_wanted(run_dir, workers)
    return before
