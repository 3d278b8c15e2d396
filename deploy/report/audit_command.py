"""`headrace audit`: reads the books of a fleet, running or stopped, and reports their problems."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO, TypeVar

import orjson
from rich.console import Console

from headrace.deploy.report.audit import audit, find_books, render, warnings
from headrace.deploy.report.evidence import read_evidence
from headrace.deploy.run.redis_server import serving
from headrace.deploy.run.redis_view import FleetView, Snapshot

T = TypeVar("T")

FILE_WIDTH = 160
"""Columns of a table that goes to a file or a pipe, which has no width of its own."""
CATCH_UP_S = 5.0
PAUSE_S = 0.25


def audit_run(run_dir: Path, *, as_json: bool, stream: TextIO, named: tuple[str, str] | None = None) -> list[str]:
    """Print the rows and the problems. Return the problems. `named` is as in `find_books`.

    Raises `RunDirError` without a fleet, and `RedisUnavailableError` when its Redis cannot be read.
    """
    snapshot, problems = read_and_audit(run_dir, named)
    warned = warnings(snapshot)
    if as_json:
        print(orjson.dumps(_as_json(snapshot, problems, warned)).decode(), file=stream)
    else:
        Console(file=stream, width=None if stream.isatty() else FILE_WIDTH).print(render(snapshot, problems, warned))
    return problems


def read_and_audit(run_dir: Path, named: tuple[str, str] | None = None) -> tuple[Snapshot, list[str]]:
    """Return the books of a fleet, running or stopped, and their problems. `named` is as in `find_books`.

    Raises `RunDirError` without a fleet, and `RedisUnavailableError` when its Redis cannot be read.
    """
    url, fleet_id = find_books(run_dir, named)
    with serving(run_dir, url), FleetView(url, fleet_id) as view:

        def look() -> tuple[Snapshot, list[str], float]:
            evidence = read_evidence(run_dir, fleet_id)  # first: the ledger may be ahead of it, and not behind
            now = view.read()
            return now, audit(now, evidence), now.reported_unix_s or 0.0

        return once_caught_up(look)


def once_caught_up(look: Callable[[], tuple[T, list[str], float]]) -> tuple[T, list[str]]:
    """Return the result of `look`. While a broker reports, retry problems for some seconds: its counts lag behind."""
    deadline = time.monotonic() + CATCH_UP_S
    while True:
        seen, problems, reported_unix_s = look()
        reports = abs(time.time() - reported_unix_s) < CATCH_UP_S
        if not problems or not reports or time.monotonic() > deadline:
            return seen, problems
        time.sleep(PAUSE_S)


def _as_json(snapshot: Snapshot, problems: list[str], warned: list[str]) -> dict[str, object]:
    return {
        "fleet_id": snapshot.fleet_id,
        "balanced": not problems,
        "problems": problems,
        "warnings": warned,
        "ledger": snapshot.fleet.model_dump(),
        "rows": [row.model_dump() for _, row in sorted(snapshot.rows.items())],
        "folded": [{"lives": lives.lives, **lives.model_dump()} for _, lives in sorted(snapshot.folded.items())],
        "totals": dict(snapshot.totals),
    }
