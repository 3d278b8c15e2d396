"""The kernel's facts about a process: whether it is alive, whether it is stopped, and when it started."""

from __future__ import annotations

import os
import time
from pathlib import Path

_STATE, _PARENT, _START = 0, 1, 19
"""Places of the fields in /proc/PID/stat, counted behind the command's name; see proc(5)."""


def is_alive(pid: int) -> bool:
    """Return whether a process with that pid is alive. A zombie (ended, not yet reaped) is not."""
    return _field(pid, _STATE) not in ("", "Z", "X")


def is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped the process with that pid. A process in a debugger does not count."""
    return _field(pid, _STATE) == "T"


def waits_for_disk(thread_id: int) -> bool:
    """Return whether the thread waits in the kernel, without being interruptible, as for a disk."""
    return _field(thread_id, _STATE) == "D"


def parent_of(pid: int) -> int:
    """Return the pid of the parent of a process; 0 for none."""
    return int(_field(pid, _PARENT) or 0)


def start_ticks(pid: int) -> int:
    """Return when the process of that pid was started, in clock ticks since the machine was; 0 for none.

    The pid and the start time together identify a process. A pid is reused, and in a container most have pid 1.
    """
    return int(_field(pid, _START) or 0)


def lived_s(pid: int) -> float | None:
    """Return for how long the process of that pid has lived; None for none. Steps of the clock do not change it."""
    ticks = start_ticks(pid)
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK") if ticks else None


def _field(pid: int, place: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[place]
    except (OSError, IndexError):
        return ""
