"""The memory and processor time of a worker's process, and how it keeps the memory of large arrays."""

from __future__ import annotations

import ctypes
import os
import resource
import time
from contextlib import suppress
from pathlib import Path

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 1 << 30
_UTIME, _RSS = 11, 21
"""Places of fields in /proc/PID/stat behind the command's name; see proc(5). The time of the system is next."""
_PAGE, _TICKS = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")
"""Arrays up to this size share the heap. The process keeps up to this much free memory at the heap's end."""


def keep_large_arrays() -> bool:
    """Let freed memory of large arrays serve the next ones; return whether the C library does so.

    By default glibc returns this memory to the system after each batch, and takes new pages for the next one. The page
    faults cost more than filling the pages. With this setting the process stays as large as at its peak. Settings of
    the user in the environment win. Other C libraries are not changed.
    """
    if "MALLOC_MMAP_THRESHOLD_" in os.environ or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    return set_option is not None and all(
        set_option(option, _KEPT_BYTES) == 1 for option in (_TRIM_THRESHOLD, _MMAP_THRESHOLD)
    )


def own_usage() -> tuple[float, int] | None:
    """Return (processor time in seconds, resident bytes) of this process; None without Linux's proc(5)."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return None
    return time.process_time(), pages * _PAGE


def env_processes_usage() -> tuple[float, int] | None:
    """Return (processor time in seconds, resident bytes) of this process' children, which are those of its envs.

    The time includes that of children that have ended. None while none runs, and without Linux's proc(5).
    """
    stats = []
    with suppress(OSError):  # a process may end meanwhile
        for children in Path("/proc/self/task").glob("*/children"):
            for pid in children.read_text().split():
                with suppress(OSError):
                    stats.append(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split())
    if not stats:
        return None
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    ticks = sum(int(stat[_UTIME]) + int(stat[_UTIME + 1]) for stat in stats)
    return ended.ru_utime + ended.ru_stime + ticks / _TICKS, sum(int(stat[_RSS]) for stat in stats) * _PAGE
