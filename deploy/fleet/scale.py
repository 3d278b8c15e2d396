"""`headrace scale N`: the number of workers that a running `headrace up` keeps on its machine.

RUN_DIR/workers.json has the number that was asked for. The supervisor looks at it every second.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import orjson

from headrace.deploy.process.fleet_errors import scale_error
from headrace.deploy.process.proc_stat import is_alive
from headrace.deploy.process.supervisor import Role
from headrace.deploy.run.fleet_file import FleetFile, read_fleet_file
from headrace.deploy.run.run_dir import write_private
from headrace.schemas.basics.printable import to_paste
from headrace.schemas.basics.run_files import read_object
from headrace.schemas.errors import writing
from headrace.schemas.peers.fleet_address import how_it_ended
from headrace.schemas.settings.config import MOST_WORKERS_ON_RAY
from headrace.schemas.settings.config_loading import load_config

log = logging.getLogger("headrace.supervisor")

MOST_WORKERS = 1000
RAY_FILE = "ray.json"
DEADLINE_S = 60.0
_LOOK_S, _SAY_S = 0.2, 10.0


def asked_workers(run_dir: Path, name: str = "workers.json", most: int = MOST_WORKERS) -> int | None:
    """Return the number of workers in a file of the run; None without the file, or if it has no valid number."""
    asked = read_object(run_dir / name).get("workers")
    return asked if type(asked) is int and 0 <= asked <= most else None


def forget_asked_workers(run_dir: Path) -> None:
    """Remove the number that was asked of an earlier run in this directory."""
    with writing(_path(run_dir)):
        _path(run_dir).unlink(missing_ok=True)


def scale(run_dir: Path, workers: int, say: Callable[[str], None]) -> None:
    """Ask the supervisor of a run for this number of workers, and wait until it has them.

    Raises `RunDirError` without a run, and `FleetError` if the run cannot have that many, or not in time.
    """
    fleet = running_fleet(run_dir)
    check_numbers(run_dir, {"fleet.workers": workers})
    say(f"fleet {fleet.fleet_id}: {_count(fleet)} workers run, {workers} are asked for")
    write_private(_path(run_dir), orjson.dumps({"workers": workers}))
    began, say_at = time.monotonic(), _SAY_S
    while (running := _count(read_fleet_file(run_dir / "fleet.json"))) != workers:
        waited_s = time.monotonic() - began
        if waited_s > DEADLINE_S:
            raise scale_error(f"{running} workers run after {waited_s:.0f} s", f"see {run_dir}/logs/supervisor.log")
        if waited_s > say_at:
            say_at += _SAY_S
            say(f"{running} workers run; waiting ({waited_s:.0f} s of at most {DEADLINE_S:.0f} s)")
        time.sleep(_LOOK_S)
    say(f"{workers} workers run")


def running_fleet(run_dir: Path) -> FleetFile:
    """Return the fleet of a run. Raises `RunDirError` without a run, and `FleetError` for one that does not run."""
    fleet = read_fleet_file(run_dir / "fleet.json")
    if fleet.state != "running" or not is_alive(fleet.supervisor_pid):
        problem = how_it_ended(run_dir) or f"the run in {run_dir} does not run (it is {fleet.state})"
        raise scale_error(problem, f"go on with `headrace up --resume {to_paste(run_dir)}`")
    return fleet


def check_numbers(run_dir: Path, wanted: Mapping[str, int]) -> None:
    """Check that a run can go on with the `wanted` numbers of workers, by setting. Raises `FleetError`.

    A number that is not among them stays as it was last asked for.
    """
    config, _ = load_config(run_dir / "config.json", environ={})
    started = config.fleet.workers
    if config.sampling.synchronous:
        raise scale_error("sampling.synchronous = true needs a fixed number of workers", "start the run again")
    has_ports = config.sampling.env_placement == "remote" or config.serving.enabled
    if has_ports and wanted.get("fleet.workers", 0) > started:
        raise scale_error(
            f"the run has ports for {started} workers", "start it again with more, or start workers alone"
        )
    on_ray = config.ray.workers and asked_workers(run_dir, RAY_FILE, MOST_WORKERS_ON_RAY)
    asked = {"fleet.workers": asked_workers(run_dir), "ray.workers": on_ray}
    then = config.replaced({key: number for key, number in asked.items() if number is not None} | dict(wanted))
    workers = then.fleet.workers + then.ray.workers
    window, held = then.worker.window_batches, then.broker.max_held_batches
    if workers and ((window and then.keeps_too_little(window)) or (held and then.holds_too_little(held))):
        why = f"{workers} workers and the learner would wait for each other"
        raise scale_error(why, "raise worker.window_batches or broker.max_held_batches, and start the run again")


def _count(fleet: FleetFile) -> int:
    return sum(process.role == Role.WORKER for process in fleet.processes)


def _path(run_dir: Path) -> Path:
    return run_dir / "workers.json"
