"""What it costs to start a fleet: from `headrace up` to first weights and first env steps, and to the end for mistakes.

The limit is a Python that imports torch and gymnasium and ends: a worker and the learner do at least that.

PYTHONPATH=tests python -m bench.run --only startup
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from bench.table import Row
from headrace.deploy.fleet_file import read_fleet_file
from headrace.deploy.redis_view import FleetView, Snapshot
from headrace.schemas.errors import RedisUnavailableError, RunDirError

MISTAKE_S = 3.0
"""The longest that a mistake may take to be named."""
_IMPORTS = "import gymnasium, torch"
_DEADLINE_S = 120.0
_MISTAKES = {
    "a misspelt env id": ("--env", "CartPol-v1"),
    "a misspelt module": ("--set", "module.build=headrace.workers.modules:actor_critc"),
}
_REPORTS = ("--set", "broker.report_interval_s=0.02")


def measure(rounds: int) -> list[Row]:
    """One row for each moment of a start, and for each mistake; times in ms."""
    turns = [_turn() for _ in range(rounds)]
    rows = []
    for case in turns[0]:
        times = [turn[case] for turn in turns]
        limits = [MISTAKE_S if case in _MISTAKES else turn["imports of torch and gymnasium"] for turn in turns]
        ratios = [took / limit for took, limit in zip(times, limits, strict=True)]
        spread = statistics.median(ratios), min(ratios), max(ratios)
        most = 1.0 if case in _MISTAKES else None
        rows.append(Row("startup", case, "headrace up", "ms", 1000 * statistics.median(times), *spread, most=most))
    return rows


def _turn() -> dict[str, float]:
    times = {"imports of torch and gymnasium": _ends([sys.executable, "-c", _IMPORTS])}
    with _fleet() as moments:
        times |= {f"to {what}": took for what, took in moments.items()}
    with _fleet("--no-check-env") as moments:
        times |= {f"to {what}, no env built before": took for what, took in moments.items()}
    for mistake, arguments in _MISTAKES.items():
        with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
            times[mistake] = _ends(_up(Path(folder) / "run", *arguments))
    return times


def _up(run_dir: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "headrace.deploy", "up", "--run-dir", str(run_dir), *_REPORTS, *arguments]


def _ends(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, capture_output=True, check=False, timeout=_DEADLINE_S)
    return time.perf_counter() - began


@contextmanager
def _fleet(*arguments: str) -> Iterator[Mapping[str, float]]:
    """Start a fleet, yield when what came first in it, and stop it."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        run_dir = Path(folder) / "run"
        began = time.perf_counter()
        silent = subprocess.DEVNULL
        with subprocess.Popen(_up(run_dir, *arguments), stdout=silent, stderr=silent) as process:
            try:
                yield _moments(run_dir, began)
            finally:
                process.terminate()


def _moments(run_dir: Path, began: float) -> Mapping[str, float]:
    awaited: dict[str, Callable[[Snapshot], object]] = {
        "first weights": lambda snapshot: snapshot.gauges.get("weights_seq"),
        "first env steps": lambda snapshot: snapshot.totals.get("env_steps_sampled_total"),
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
