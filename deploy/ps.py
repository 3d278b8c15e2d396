"""`headrace ps`: shows the processes in fleet.json, and whether each is alive."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.table import Table

from headrace.deploy.fleet_file import FleetFile


def processes(fleet: FleetFile, now: float) -> list[dict[str, Any]]:
    """Return a row for each process of the fleet, living or waiting, with `alive` as the kernel sees it now."""
    living = [
        {**entry.model_dump(), "alive": is_alive(entry.pid), "age_s": round(now - entry.started, 1)}
        for entry in fleet.processes
    ]
    waiting = [{**entry.model_dump(), "pid": None, "incarnation": None, "alive": False} for entry in fleet.waiting]
    return living + waiting


def is_alive(pid: int) -> bool:
    """Return whether a process of that pid runs. One that has ended and is not yet reaped does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in ("Z", "X")


def table(fleet: FleetFile) -> Table:
    """Return a table for people."""
    alive = is_alive(fleet.supervisor_pid)
    supervisor = f"supervisor pid {fleet.supervisor_pid}" if alive else "no supervisor lives"
    title = f"fleet {fleet.fleet_id}: {fleet.state}, {supervisor}"
    result = Table("name", "role", "inc.", "pid", "age", "restarts", "state", title=title, title_justify="left")
    ports = [f"{name} {where}" for name, where in fleet.endpoints.items() if name.startswith("envs-")]
    if ports:
        result.caption, result.caption_justify = f"env hosts connect to {', '.join(ports)}", "left"
    for row in processes(fleet, time.time()):
        age = f"{row['age_s']:.0f} s" if "age_s" in row else "-"
        state = row["state"] if row["alive"] or row["pid"] is None else f"{row['state']}, but gone"
        cells = (row["name"], row["role"], row["incarnation"], row["pid"], age, row["restarts"], state)
        result.add_row(*("-" if cell is None else str(cell) for cell in cells))
    return result
