"""Facts of the kernel about a process: whether it lives, whether it is stopped, and which process of that pid it is."""

from __future__ import annotations

from pathlib import Path

_STATE, _START = 0, 19
"""Places of the fields in /proc/PID/stat, counted behind the command's name; see proc(5)."""


def is_alive(pid: int) -> bool:
    """Return whether a process of that pid runs. One that has ended and is not yet reaped does not."""
    return _field(pid, _STATE) not in ("", "Z", "X")


def is_stopped(pid: int) -> bool:
    """Return whether a process of that pid was stopped by a signal. One in a debugger is not."""
    return _field(pid, _STATE) == "T"


def start_ticks(pid: int) -> int:
    """Return when the process of that pid was started, in clock ticks since the machine was; 0 for none.

    With the pid it names a process for good: a pid is used again, and in a container most processes have pid 1.
    """
    return int(_field(pid, _START) or 0)


def _field(pid: int, place: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[place]
    except (OSError, IndexError):
        return ""
