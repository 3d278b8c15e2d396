"""`headrace ps`: shows the processes in fleet.json, whether each is alive, and workers that came from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from rich.table import Table

from headrace.deploy.process.proc_stat import is_alive
from headrace.deploy.report.progress import name_revoked
from headrace.deploy.run.fleet_file import FleetFile
from headrace.deploy.run.redis_view import FleetView, Snapshot, told_versions
from headrace.schemas.accounts.redis_keys import revoked_sessions
from headrace.schemas.basics.printable import one_line
from headrace.schemas.errors import RedisUnavailableError

Row = dict[str, Any]
NONE_REVOKED: Mapping[str, int] = MappingProxyType({})


def processes(fleet: FleetFile, now: float) -> list[Row]:
    """Return a row for each process of the fleet, living or waiting, with `alive` as the kernel sees it now."""
    living = [
        {**entry.model_dump(), "alive": is_alive(entry.pid), "age_s": round(now - entry.started, 1)}
        for entry in fleet.processes
    ]
    waiting = [{**entry.model_dump(), "pid": None, "incarnation": None, "alive": False} for entry in fleet.waiting]
    return living + waiting


def reported(fleet: FleetFile) -> Snapshot:
    """Return the fleet's state in Redis. It is empty if no process of the fleet is alive.

    Raises `RedisUnavailableError`.
    """
    if not fleet.redis_url or not is_alive(fleet.supervisor_pid):
        return Snapshot()
    with FleetView(fleet.redis_url, fleet.fleet_id) as view:
        return view.read()


def workers_elsewhere(fleet: FleetFile, seen: Snapshot) -> list[Row]:
    """Return a row for each worker in the fleet's `seen` state that this fleet's supervisor has not started."""
    own = {entry.slot for entry in fleet.processes} | {entry.slot for entry in fleet.waiting}
    return [
        {
            "name": f"worker-{slot}",
            "role": "worker",
            "slot": slot,
            "incarnation": state.get("incarnation"),
            "pid": state.get("pid") or None,
            "host": str(state.get("host", "")),
            "restarts": 0,
            "state": "connected",
            "alive": True,
        }
        for slot, state in sorted(seen.workers.items())
        if slot not in own
    ]


def all_processes(fleet: FleetFile, now: float) -> tuple[list[Row], str]:
    """Return a row for each process of the fleet and each worker from elsewhere, and what could not be read.

    `headrace_version` of a row is the version of Headrace that the process reports; None if it is unknown.
    """
    try:
        seen, missing = reported(fleet), ""
    except RedisUnavailableError as error:
        seen, missing = Snapshot(), f"versions and workers from elsewhere are not shown: {error}"
    told = told_versions(seen)
    rows = processes(fleet, now) + workers_elsewhere(fleet, seen)
    return [{**row, "headrace_version": told.get(row["name"]) or None} for row in rows], missing


def sessions_revoked(fleet: FleetFile) -> dict[str, int]:
    """Return how many sessions have ended because their key was revoked, by key; empty where Redis is away."""
    try:
        return revoked_sessions(reported(fleet).gauges)
    except RedisUnavailableError:
        return {}


def table(fleet: FleetFile, rows: list[Row], missing: str = "", revoked: Mapping[str, int] = NONE_REVOKED) -> Table:
    """Return a table for people of the `rows` that `all_processes` gave, and of what is `missing` in them.

    `revoked` is what `sessions_revoked` gave.
    """
    alive = is_alive(fleet.supervisor_pid)
    supervisor = f"supervisor pid {fleet.supervisor_pid}" if alive else "no supervisor lives"
    title = f"fleet {fleet.fleet_id}: {fleet.state}, {supervisor}"
    result = Table(
        "name", "role", "inc.", "pid", "age", "restarts", "version", "state", title=title, title_justify="left"
    )
    ports = [f"{name} {where}" for name, where in fleet.endpoints.items() if name.startswith("envs-")]
    notes = [f"env hosts connect to {', '.join(ports)}"] if ports else []
    if revoked:
        notes.append(f"revoked keys: {name_revoked(revoked)}; headrace keys list shows the keys")
    result.caption, result.caption_justify = "\n".join(filter(None, [*notes, missing])) or None, "left"
    for row in rows:
        age = f"{row['age_s']:.0f} s" if "age_s" in row else "-"
        counts = (row["incarnation"], row["pid"], age, row["restarts"], row.get("headrace_version"))
        cells = (row["name"], row["role"], *counts, _state(row))
        result.add_row(*("-" if cell is None else str(cell) for cell in cells))
    return result


def _state(row: Row) -> str:
    if "host" in row:
        return f"{row['state']}, on {one_line(str(row['host'])) or 'another machine'}"
    state: str = row["state"]
    return state if row["alive"] or row["pid"] is None else f"{state}, but gone"
