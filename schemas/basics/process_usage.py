"""Processor time, memory, cores and torch's threads of processes of this machine; most from the kernel's proc(5)."""

from __future__ import annotations

import math
import os
import resource
import sys
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


def free_memory() -> float:
    """Return the bytes of memory that processes may still take; infinity where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, IndexError, ValueError, StopIteration):
        return math.inf


def own_cores() -> int:
    """Return the number of cores on which this process may run."""
    return len(os.sched_getaffinity(0))


def torch_threads() -> int:
    """Return how many threads torch uses for one operation in this process.

    0 where torch is not loaded, or works on a GPU: its threads on the CPU have little to do then.
    """
    torch = sys.modules.get("torch")
    count = getattr(torch, "get_num_threads", int)  # absent while torch is being imported, as `cuda`
    on_gpu = getattr(getattr(torch, "cuda", None), "is_initialized", bool)
    return 0 if on_gpu() else count()


def crowded_cores(threads: int, cores: int, workers: int) -> tuple[str, str] | None:
    """Return, in words, that torch's threads in a learner take the cores of the workers on its host, and the remedy.

    None where they do not. Threads that wait for one another for a core cost more than they bring.
    """
    left = max(1, cores - workers)
    if not workers or not cores or threads <= left:
        return None
    shared = f"{cores} cores with {workers} workers" if workers > 1 else f"{cores} cores with a worker"
    sentence = f"torch uses {threads} threads in the learner, which shares {shared}: both get slower"
    most = f" (at most {left})" if left > 1 else ""
    return sentence, f"call torch.set_num_threads(1){most}, or set OMP_NUM_THREADS=1"


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
