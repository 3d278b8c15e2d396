"""`headrace audit`: reads the books of a fleet, running or stopped, and says what is wrong with them."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

import orjson
from rich.console import Console

from headrace.deploy.audit import audit, find_books, render, warnings
from headrace.deploy.redis_server import serving
from headrace.deploy.redis_view import FleetView, Snapshot
from headrace.schemas.errors import LedgerError

FILE_WIDTH = 160
"""Columns of a table that goes to a file or a pipe, which has no width of its own."""


def audit_run(run_dir: Path, *, strict: bool, as_json: bool, stream: TextIO) -> None:
    """Print the rows and what is wrong.

    Raises `LedgerError` naming the problems when `strict`, `RunDirError` without a fleet, and `RedisUnavailableError`
    when its Redis cannot be read.
    """
    url, fleet_id = find_books(run_dir)
    with serving(run_dir, url), FleetView(url, fleet_id) as view:
        snapshot = view.read()
    problems, warned = audit(snapshot), warnings(snapshot)
    if as_json:
        print(orjson.dumps(_as_json(snapshot, problems, warned)).decode(), file=stream)
    else:
        Console(file=stream, width=None if stream.isatty() else FILE_WIDTH).print(render(snapshot, problems, warned))
    if strict and problems:
        raise LedgerError("the books do not balance: " + "; ".join(problems))


def _as_json(snapshot: Snapshot, problems: list[str], warned: list[str]) -> dict[str, object]:
    return {
        "fleet_id": snapshot.fleet_id,
        "balanced": not problems,
        "problems": problems,
        "warnings": warned,
        "ledger": snapshot.fleet.model_dump(),
        "rows": [row.model_dump() for _, row in sorted(snapshot.rows.items())],
        "totals": dict(snapshot.totals),
    }
