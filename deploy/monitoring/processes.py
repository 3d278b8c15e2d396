"""The states of a fleet's processes on this machine, from fleet.json, recorders, liveness files and /proc."""

from __future__ import annotations

import platform
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from headrace.deploy.process.liveness_file import seconds_silent
from headrace.deploy.process.proc_stat import is_alive, is_stopped
from headrace.deploy.process.recorders import recorder_path
from headrace.deploy.run.fleet_file import FleetFile, ProcessEntry, WaitingEntry
from headrace.schemas.accounts.process_state import MOST_WORDS, ProcessState
from headrace.schemas.accounts.recorder import read_recorder
from headrace.schemas.basics.process_usage import usage_of

GONE = "gone"
"""The state of a process that fleet.json names and that does not live."""

STOPPED = "stopped"
"""The state of the supervisor of a fleet that has ended in order."""

SUPERVISOR = "supervisor"
LEAST_ROOM = 64 << 20
"""Bytes; a disk with less counts as full."""
_NO_USAGE = (0.0, 0)
_LONG_CALL_S = 2.0
"""Seconds after which a call of a user's code is told as what a worker does."""


def processes_of(fleet: FleetFile, run_dir: Path) -> dict[str, ProcessState]:
    """Return the state of the supervisor and of each process in `fleet`, by name.

    Leave out a replaced process that still lives: its successor has its name. Takes about 0.2 ms a process.
    """
    found = [_supervisor(fleet, run_dir), *_living(fleet, run_dir), *map(_state, fleet.waiting)]
    return {state.name: state for state in found}


def free_bytes(run_dir: Path) -> int | None:
    """Return the bytes that this user may still write to the disk of a directory; None once it was removed."""
    try:
        return shutil.disk_usage(run_dir).free
    except OSError:
        return None


def _supervisor(fleet: FleetFile, run_dir: Path) -> ProcessState:
    pid, lives = fleet.supervisor_pid, is_alive(fleet.supervisor_pid)
    state = fleet.state if lives or fleet.state == STOPPED else GONE
    cpu_s, rss_bytes = (usage_of(pid) if lives else None) or _NO_USAGE
    return ProcessState(
        name=SUPERVISOR,
        role=SUPERVISOR,
        pid=pid,
        host=platform.node(),
        state=state,
        started_unix_s=fleet.started,
        cpu_s=cpu_s,
        rss_bytes=rss_bytes,
        is_stopped=is_stopped(pid),
        disk_free_bytes=free_bytes(run_dir),
        unix_s=time.time(),
    )


def _living(fleet: FleetFile, run_dir: Path) -> Iterator[ProcessState]:
    for entry in fleet.processes:
        if entry.state == "silent":
            continue
        seen: dict[str, object] = {"state": GONE if entry.state == "running" else entry.state}
        if is_alive(entry.pid):
            silent_s, doing = _signs_of_life(entry, run_dir)
            cpu_s, rss_bytes = usage_of(entry.pid) or _NO_USAGE
            seen = {"cpu_s": cpu_s, "rss_bytes": rss_bytes, "silent_s": silent_s, "doing": doing}
            seen["is_stopped"] = is_stopped(entry.pid)
        yield _state(entry, started_unix_s=entry.started, **seen)


def _state(entry: ProcessEntry | WaitingEntry, **seen: object) -> ProcessState:
    own = {"host": platform.node(), "last_words": entry.last_words[:MOST_WORDS], "unix_s": time.time()}
    return ProcessState.model_validate(entry.model_dump() | own | seen)


def _signs_of_life(entry: ProcessEntry, run_dir: Path) -> tuple[float, str]:
    """Return (seconds since the last sign of life, the activity that the process last recorded)."""
    if entry.slot is None:
        place = run_dir / "logs" / f".{entry.name}-{entry.incarnation}.alive"
        return max(0.0, seconds_silent(place) or 0.0), ""
    try:
        reading = read_recorder(recorder_path(run_dir / "recorders", entry.slot, entry.incarnation))
    except OSError:
        return 0.0, ""
    if reading is None:
        return 0.0, "loading"
    now_ns = time.monotonic_ns()
    doing = "" if reading.silent_until_ns <= now_ns else "rebuilding" if reading.totals.stepped else "building"
    silent_s = max(0.0, (now_ns - reading.updated_ns) / 1e9)
    if not doing and silent_s > _LONG_CALL_S:
        doing = reading.watched.in_words(now_ns, reading.updated_ns)
    return silent_s, doing
