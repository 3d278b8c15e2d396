"""Time of starts, restarts and ends: from `headrace up` to first weights and first env steps, to the end for mistakes,
from the death of a worker, of the broker or of all processes to what is new after it, and from the last step of a run
to the end of the command.

The limit is a Python that imports torch and gymnasium and ends: a worker and the learner do at least that. Mistakes and
recoveries have limits in seconds.

PYTHONPATH=tests python -m bench.run --only startup
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from bench.table import Row
from headrace.deploy.process.recorders import recorder_path
from headrace.deploy.run.checkpoint_facts import NEWEST_FILE
from headrace.deploy.run.fleet_file import ProcessEntry, read_fleet_file
from headrace.deploy.run.redis_view import FleetView, Snapshot
from headrace.deploy.run.resume import read_told
from headrace.schemas.accounts.recorder import Reading, read_recorder
from headrace.schemas.errors import RedisUnavailableError, RunDirError

MISTAKE_S = 3.0
"""The longest that a mistake may take to be named."""
_WORKER, _SLOT = "a killed worker to its next life's steps", "a killed worker to its next life's batch"
_BROKER, _ALL = "a killed broker to a commit of new steps", "a start after a kill of all to an update"
RECOVERY_S = {_WORKER: 2.0, _SLOT: 5.0, _BROKER: 2.0, _ALL: 5.0}
"""The longest that a recovery may take in the median."""
SLOWEST_S = 5.0
"""The longest that any recovery may take."""
_IMPORTS = "import gymnasium, torch"
_DEADLINE_S = 120.0
_MISTAKES = {
    "a misspelt env id": ("--env", "CartPol-v1"),
    "a misspelt module": ("--set", "module.build=headrace.workers.modules:actor_critc"),
}
_STEPS = 4096
_LIFE_S = 3.0
_OFTEN = ("--set", "broker.report_interval_s=0.02")
"""Reports at which a moment is seen at once. The end of a run is timed with the usual ones."""


def measure(rounds: int) -> list[Row]:
    """One row for each moment of a start, and for each mistake; times in ms."""
    turns = [_turn() for _ in range(rounds)]
    rows = []
    marks_s = {**dict.fromkeys(_MISTAKES, MISTAKE_S), **RECOVERY_S}
    for case in turns[0]:
        times = [turn[case] for turn in turns]
        limits = [marks_s.get(case, turn["imports of torch and gymnasium"]) for turn in turns]
        ratios = [took / limit for took, limit in zip(times, limits, strict=True)]
        spread = statistics.median(ratios), min(ratios), max(ratios)
        most = 1.0 if case in marks_s else None
        rows.append(Row("startup", case, "headrace up", "ms", 1000 * statistics.median(times), *spread, most=most))
    for case in RECOVERY_S:
        took = max(turn[case] for turn in turns)
        ratio = took / SLOWEST_S
        rows.append(Row("startup", case, "the slowest", "ms", 1000 * took, ratio, ratio, ratio, most=1.0))
    return rows


def _turn() -> dict[str, float]:
    times = {"imports of torch and gymnasium": _ends([sys.executable, "-c", _IMPORTS])}
    with _fleet() as (run_dir, moments):
        times |= {f"to {what}": took for what, took in moments.items()}
        times[_WORKER], times[_SLOT] = restart(run_dir)
        times[_BROKER] = restart_broker(run_dir)
        times[_ALL] = restart_all(run_dir)
    with _fleet("--no-check-env") as (_, moments):
        times |= {f"to {what}, no env built before": took for what, took in moments.items()}
    times["last step of a run to exit"] = goal_to_exit()
    for mistake, arguments in _MISTAKES.items():
        with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
            times[mistake] = _ends(_up(Path(folder) / "run", *arguments))
    return times


def restart(run_dir: Path) -> tuple[float, float]:
    """Kill worker 0; return the seconds until its next life takes steps, and until the learner commits some of them."""
    began, victim = _kill(run_dir, "worker-0")
    after = recorder_path(run_dir / "recorders", 0, victim.incarnation + 1)
    steps_s = _seconds_until(began, lambda: (reading := read_recorder(after)) and reading.totals.stepped)
    return steps_s, _seconds_until(began, lambda: (reading := read_recorder(after)) and reading.settled.committed[0])


def restart_broker(run_dir: Path) -> float:
    """Kill the broker; return the seconds until the learner has committed steps that no worker had taken before."""
    began, _ = _kill(run_dir, "broker")
    before = {path: reading.totals.stepped for path, reading in _recorders(run_dir).items()}

    def has_commit() -> bool:
        now = _recorders(run_dir)
        return any(now[path].settled.committed[0] > stepped for path, stepped in before.items() if path in now)

    return _seconds_until(began, has_commit)


def restart_all(run_dir: Path) -> float:
    """Kill all processes; return the seconds from the next start until the learner has trained one more update."""
    page, checkpoint, silent = read_fleet_file(run_dir / "fleet.json"), run_dir / NEWEST_FILE, subprocess.DEVNULL
    for pid in (page.supervisor_pid, *(process.pid for process in page.processes)):
        with suppress(ProcessLookupError):  # it died with the supervisor
            os.kill(pid, signal.SIGKILL)
    before = _updates(checkpoint)
    began = time.perf_counter()
    with subprocess.Popen(_up(run_dir, *_OFTEN), stdout=silent, stderr=silent) as process:
        try:
            return _seconds_until(began, lambda: _updates(checkpoint) > before)
        finally:
            process.terminate()


def _kill(run_dir: Path, name: str) -> tuple[float, ProcessEntry]:
    """Kill a process once it has lived so long that no pause follows."""
    victim = next(process for process in read_fleet_file(run_dir / "fleet.json").processes if process.name == name)
    time.sleep(max(0.0, victim.started + _LIFE_S - time.time()))
    began = time.perf_counter()
    os.kill(victim.pid, signal.SIGKILL)
    return began, victim


def _seconds_until(began: float, is_done: Callable[[], object]) -> float:
    while not is_done():
        _check_deadline(began)
        time.sleep(0.002)
    return time.perf_counter() - began


def _recorders(run_dir: Path) -> dict[Path, Reading]:
    readings = {path: read_recorder(path) for path in (run_dir / "recorders").glob("*.rec")}
    return {path: reading for path, reading in readings.items() if reading is not None}


def _updates(checkpoint: Path) -> int:
    told = read_told(checkpoint)
    return int(told["state"]["updates"]) if told is not None else 0


def goal_to_exit() -> float:
    """Return the seconds from the last step of a run of two updates to the end of the command."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        recorders = Path(folder) / "run" / "recorders"
        command, silent = _up(recorders.parent, "--until-steps", str(_STEPS)), subprocess.DEVNULL
        began = moved = time.perf_counter()
        most = 0
        with subprocess.Popen(command, stdout=silent, stderr=silent) as process:
            while process.poll() is None:
                _check_deadline(began)
                steps = sum(reading.totals.stepped for reading in _recorders(recorders.parent).values())
                if steps > most:
                    most, moved = steps, time.perf_counter()
                time.sleep(0.002)
        return time.perf_counter() - moved


def _up(run_dir: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "headrace.deploy", "up", "--run-dir", str(run_dir), *arguments]


def _ends(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, capture_output=True, check=False, timeout=_DEADLINE_S)
    return time.perf_counter() - began


@contextmanager
def _fleet(*arguments: str) -> Iterator[tuple[Path, Mapping[str, float]]]:
    """Start a fleet, yield its run directory and when what came first in it, and stop it."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        run_dir = Path(folder) / "run"
        began = time.perf_counter()
        silent = subprocess.DEVNULL
        with subprocess.Popen(_up(run_dir, *_OFTEN, *arguments), stdout=silent, stderr=silent) as process:
            try:
                yield run_dir, _moments(run_dir, began)
            finally:
                process.terminate()


def _moments(run_dir: Path, began: float) -> Mapping[str, float]:
    awaited: dict[str, Callable[[Snapshot], object]] = {
        "first weights": lambda snapshot: snapshot.gauges.get("weights_seq"),
        "first env steps": lambda snapshot: snapshot.totals.get("env_steps_total"),
    }
    moments: dict[str, float] = {}
    url, fleet_id = _books(run_dir, began)
    with FleetView(url, fleet_id) as view:
        while len(moments) < len(awaited):
            _check_deadline(began)
            try:
                snapshot = view.read()
            except RedisUnavailableError:
                continue
            now = time.perf_counter() - began
            moments |= {what: now for what, came in awaited.items() if what not in moments and came(snapshot)}
            time.sleep(0.01)
    return moments


def _books(run_dir: Path, began: float) -> tuple[str, str]:
    while True:
        _check_deadline(began)
        try:
            page = read_fleet_file(run_dir / "fleet.json")
        except RunDirError:
            page = None
        if page is not None and page.redis_url:
            return page.redis_url, page.fleet_id
        time.sleep(0.01)


def _check_deadline(began: float) -> None:
    if time.perf_counter() - began > _DEADLINE_S:
        raise TimeoutError(f"the fleet took no step in {_DEADLINE_S} s")
