"""Processor time and memory of processes of this machine, from the kernel's proc(5)."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from pathlib import Path

Usage = tuple[float, int]
"""(processor time in seconds, resident bytes)."""

_UTIME, _STIME, _RSS = 11, 12, 21
"""Places of the fields in /proc/PID/stat, counted behind the command's name."""
_TICKS, _PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")


def usage_of(pid: int) -> Usage | None:
    """Return what a process uses; None for one that has ended, and where the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[_UTIME]) + int(fields[_STIME])) / _TICKS, int(fields[_RSS]) * _PAGE
    except (OSError, IndexError, ValueError):
        return None


def usage_of_children() -> Usage | None:
    """Return what the children of this process use together; None while none runs, or where the system does not tell.

    The time includes that of children that have ended. Memory that they share counts in each.
    """
    pids: list[str] = []
    for children in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            pids += children.read_text().split()
    found = [usage for usage in map(usage_of, map(int, pids)) if usage is not None]
    if not found:
        return None
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended.ru_utime + ended.ru_stime + sum(cpu_s for cpu_s, _ in found), sum(rss for _, rss in found)
