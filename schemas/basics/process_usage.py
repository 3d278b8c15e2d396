"""Processor time and memory of processes of this machine, from the kernel's proc(5)."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from pydantic import Strict

from headrace.schemas.basics.bounds import Bytes, Seconds

Usage = Annotated[tuple[Seconds, Bytes], Strict(False)]
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


def own_usage() -> Usage | None:
    """Return what this process uses; None where the system does not tell."""
    return usage_of(os.getpid())


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


def usage_with_children() -> Usage | None:
    """Return what this process and its children use together; None where the system does not tell."""
    own, children = own_usage(), usage_of_children() or (0.0, 0)
    return None if own is None else (own[0] + children[0], own[1] + children[1])
