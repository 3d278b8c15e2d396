"""`headrace ps`: shows the processes in fleet.json, whether each is alive, and workers that came from elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from headrace.deploy.fleet_file import FleetFile
from headrace.deploy.redis_view import FleetView
from headrace.schemas.errors import RedisUnavailableError

Row = dict[str, Any]


def processes(fleet: FleetFile, now: float) -> list[Row]:
    """Return a row for each process of the fleet, living or waiting, with `alive` as the kernel sees it now."""
    living = [
        {**entry.model_dump(), "alive": is_alive(entry.pid), "age_s": round(now - entry.started, 1)}
        for entry in fleet.processes
    ]
    waiting = [{**entry.model_dump(), "pid": None, "incarnation": None, "alive": False} for entry in fleet.waiting]
    return living + waiting


def workers_elsewhere(fleet: FleetFile) -> list[Row]:
    """Return a row for each worker that this fleet's supervisor has not started, as the broker reports to Redis.

    Raises `RedisUnavailableError`. There are none where nothing of the fleet lives any more.
    """
    if not fleet.redis_url or not is_alive(fleet.supervisor_pid):
        return []
    own = {entry.slot for entry in fleet.processes} | {entry.slot for entry in fleet.waiting}
    with FleetView(fleet.redis_url, fleet.fleet_id) as view:
        workers = view.read().workers
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
        for slot, state in sorted(workers.items())
        if slot not in own
    ]


def all_processes(fleet: FleetFile, now: float) -> tuple[list[Row], str]:
    """Return a row for each process of the fleet and each worker from elsewhere, and what could not be read."""
    try:
        return processes(fleet, now) + workers_elsewhere(fleet), ""
    except RedisUnavailableError as error:
        return processes(fleet, now), f"workers from elsewhere are not shown: {error}"


def is_alive(pid: int) -> bool:
    """Return whether a process of that pid runs. One that has ended and is not yet reaped does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in ("Z", "X")


def table(fleet: FleetFile, rows: list[Row], missing: str = "") -> Table:
    """Return a table for people of the `rows` that `all_processes` gave, and of what is `missing` in them."""
    alive = is_alive(fleet.supervisor_pid)
    supervisor = f"supervisor pid {fleet.supervisor_pid}" if alive else "no supervisor lives"
    title = f"fleet {fleet.fleet_id}: {fleet.state}, {supervisor}"
    result = Table("name", "role", "inc.", "pid", "age", "restarts", "state", title=title, title_justify="left")
    ports = [f"{name} {where}" for name, where in fleet.endpoints.items() if name.startswith("envs-")]
    notes = [f"env hosts connect to {', '.join(ports)}"] if ports else []
    result.caption, result.caption_justify = "\n".join(filter(None, [*notes, missing])) or None, "left"
    for row in rows:
        age = f"{row['age_s']:.0f} s" if "age_s" in row else "-"
        cells = (row["name"], row["role"], row["incarnation"], row["pid"], age, row["restarts"], _state(row))
        result.add_row(*("-" if cell is None else str(cell) for cell in cells))
    return result


def _state(row: Row) -> str:
    if "host" in row:
        return f"{row['state']}, on {row['host'] or 'another machine'}"
    state: str = row["state"]
    return state if row["alive"] or row["pid"] is None else f"{state}, but gone"
