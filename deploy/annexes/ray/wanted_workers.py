"""`RUN_DIR/ray.json`: how many workers the run has on Ray. `headrace ray scale` replaces it."""

from __future__ import annotations

from pathlib import Path

import orjson

from headrace.deploy.fleet.scale import RAY_FILE, asked_workers, check_numbers, running_fleet
from headrace.deploy.process.fleet_errors import scale_error
from headrace.deploy.run.run_dir import write_private
from headrace.schemas.errors import RunDirError
from headrace.schemas.settings.config import MOST_WORKERS_ON_RAY


def write_wanted(run_dir: Path, workers: int) -> None:
    """Replace the file in one step."""
    write_private(run_dir / RAY_FILE, orjson.dumps({"workers": workers}))


def read_wanted(run_dir: Path) -> int:
    """Return the number in the file. Raises `RunDirError` where there is none to be read."""
    wanted = asked_workers(run_dir, RAY_FILE, MOST_WORKERS_ON_RAY)
    if wanted is None:
        raise RunDirError(str(run_dir), f"{RAY_FILE} does not say how many workers it has on Ray")
    return wanted


def scale_run(run_dir: Path, workers: int) -> int:
    """Have the run keep `workers` on Ray. Return how many it kept before.

    Raises `RunDirError` where no run is, and `FleetError` where it does not run, or cannot have so many on Ray.
    """
    fleet = running_fleet(run_dir)
    if "ray" not in {*(entry.name for entry in fleet.processes), *(entry.name for entry in fleet.waiting)}:
        raise scale_error(
            f"the run in {run_dir} keeps no workers on Ray", "start one with `headrace ray up --workers N`"
        )
    before = read_wanted(run_dir)
    check_numbers(run_dir, {"ray.workers": workers})
    write_wanted(run_dir, workers)
    return before
