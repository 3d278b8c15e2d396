"""`headrace ps`: shows the processes in fleet.json, whether each is alive, and workers that came from elsewhere.

A fleet may have a thousand workers. So `ps` reads from Redis only what it shows, and prints one plain line for each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from headrace.deploy.process.proc_stat import is_alive, lived_s
from headrace.deploy.report.progress import name_revoked, number
from headrace.deploy.run.fleet_file import FleetFile
from headrace.deploy.run.redis_view import FleetView, Snapshot, told_versions
from headrace.schemas.accounts import redis_keys as keys
from headrace.schemas.basics.printable import one_line
from headrace.schemas.errors import RedisUnavailableError

Row = dict[str, Any]
NONE_REVOKED: Mapping[str, int] = MappingProxyType({})
_SHOWN = (keys.FLEET, keys.GAUGES, keys.LEASE, keys.CONSUMER_GROUPS, keys.WORKERS)
_COLUMNS = ("name", "role", "inc.", "pid", "age", "restarts", "version", "state")


def processes(fleet: FleetFile, now: float) -> list[Row]:
    """Return a row for each process of the fleet, living or waiting, with `alive` as the kernel sees it now."""
    rows: list[Row] = []
    for entry in fleet.processes:
        lived = lived_s(entry.pid)
        age_s = max(0.0, now - entry.started if lived is None else lived)
        rows.append({**entry.model_dump(), "alive": is_alive(entry.pid), "age_s": round(age_s, 1)})
    waiting = [{**entry.model_dump(), "pid": None, "incarnation": None, "alive": False} for entry in fleet.waiting]
    return rows + waiting


def reported(fleet: FleetFile, run_dir: Path) -> tuple[Snapshot, str]:
    """Return what `ps` shows of the fleet's state, and a sentence if it could not be read; else "".

    The state is empty if no process of the fleet is alive, or if neither Redis nor the run directory tells it.
    """
    if not fleet.redis_url or not is_alive(fleet.supervisor_pid):
        return Snapshot(), ""
    try:
        with FleetView(fleet.redis_url, fleet.fleet_id, run_dir) as view:
            return view.read(_SHOWN), ""
    except RedisUnavailableError as error:
        return Snapshot(), f"versions and workers from elsewhere are not shown: {error}"


def learner_elsewhere(fleet: FleetFile, seen: Snapshot) -> list[Row]:
    """Return a row for the learner in the fleet's `seen` state if this fleet's supervisor starts none."""
    lease, heard = seen.lease, number(seen.lease.get("heard_unix_s"))
    if not heard or any(entry.role == "learner" for entry in (*fleet.processes, *fleet.waiting)):
        return []
    connected = bool(lease.get("connected"))
    gone = f"gone, last heard of {max(0.0, (seen.reported_unix_s or 0.0) - heard):.0f} s ago"
    row = _row_elsewhere("learner", None, int(number(lease.get("epoch"))), lease)
    return [row | {"state": "connected" if connected else gone, "alive": connected}]


def readers(seen: Snapshot) -> list[Row]:
    """Return a row for the reader of each consumer group in the fleet's `seen` state, if it has had one."""
    rows, now = [], seen.reported_unix_s or 0.0
    for name, books in seen.groups.items():
        if (heard := books.state.heard_unix_s) is not None:
            gone = f"gone, last heard of {max(0.0, now - heard):.0f} s ago"
            state = {"state": "connected" if books.state.connected else gone, "alive": books.state.connected}
            rows.append(
                _row_elsewhere("group", None, None, books.state.model_dump()) | state | {"name": f"group {name}"}
            )
    return rows


def workers_elsewhere(fleet: FleetFile, seen: Snapshot) -> list[Row]:
    """Return a row for each worker in the fleet's `seen` state that this fleet's supervisor has not started."""
    own = {entry.slot for entry in fleet.processes} | {entry.slot for entry in fleet.waiting}
    workers = sorted(seen.workers.items())
    return [_row_elsewhere("worker", slot, told.get("incarnation"), told) for slot, told in workers if slot not in own]


def _row_elsewhere(role: str, slot: int | None, incarnation: Any, told: Mapping[str, Any]) -> Row:
    return {
        "name": role if slot is None else f"{role}-{slot}",
        "role": role,
        "slot": slot,
        "incarnation": incarnation,
        "pid": int(number(told.get("pid"))) or None,
        "host": str(told.get("host", "")),
        "restarts": 0,
        "state": "connected",
        "alive": True,
    }


def all_processes(fleet: FleetFile, seen: Snapshot, now: float) -> list[Row]:
    """Return a row for each process of the fleet, worker from elsewhere and reader of a group, in its `seen` state.

    `headrace_version` of a row is the version of Headrace that the process reports; None if it is unknown.
    """
    told = told_versions(seen)
    rows = processes(fleet, now) + learner_elsewhere(fleet, seen) + readers(seen) + workers_elsewhere(fleet, seen)
    return [{**row, "headrace_version": told.get(row["name"]) or None} for row in rows]


def table(fleet: FleetFile, rows: list[Row], missing: str = "", revoked: Mapping[str, int] = NONE_REVOKED) -> str:
    """Return a table for people of the `rows` that `all_processes` gave, and of what is `missing` in them.

    `revoked` is the number of sessions that ended because their key was revoked, by key.
    """
    alive = is_alive(fleet.supervisor_pid)
    supervisor = f"supervisor pid {fleet.supervisor_pid}" if alive else "no supervisor lives"
    title = one_line(f"fleet {fleet.fleet_id}: {fleet.state}, {supervisor}")
    ports = [one_line(f"{name} {where}") for name, where in fleet.endpoints.items() if name.startswith("envs-")]
    notes = [f"env hosts connect to {', '.join(ports)}"] if ports else []
    if revoked:
        notes.append(f"revoked keys: {name_revoked(revoked)}; headrace keys list shows the keys")
    return "\n".join([title, *_aligned([_COLUMNS, *map(_cells, rows)]), *notes, *([missing] if missing else [])])


def _cells(row: Row) -> Sequence[str]:
    age = f"{row['age_s']:.0f} s" if "age_s" in row else "-"
    counts = (row["incarnation"], row["pid"], age, row["restarts"], row.get("headrace_version"))
    return ["-" if cell is None else one_line(str(cell)) for cell in (row["name"], row["role"], *counts, _state(row))]


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]


def _state(row: Row) -> str:
    if "host" in row:
        return f"{row['state']}, on {one_line(str(row['host'])) or 'another machine'}"
    state: str = row["state"]
    return state if row["alive"] or row["pid"] is None else f"{state}, but gone"
