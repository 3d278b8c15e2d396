"""The main program of the scripts that measure a rate: it prints the rate and the rate per second of processor time.

python SCRIPT.py MEASURE CASE SECONDS. Prints {"rate", "per_cpu_s"} as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

WARM = 0.4
"""Warm-up, as a share of the time that is measured."""

Take = Callable[[], int]
"""Returns the amount that has come since the last call: env steps, or chunks. It waits until there is some."""


def main(**measures: Callable[[str], AbstractContextManager[Take]]) -> None:
    """Open the measure that the command line names, for its case, and time it."""
    measure, case, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
    with measures[measure](case) as take:
        take()
        _take_for(take, seconds * WARM)
        spent = processor_s()
        count, elapsed = _take_for(take, seconds)
        spent = processor_s() - spent
        print(json.dumps({"rate": count / elapsed, "per_cpu_s": count / spent}), flush=True)


def _take_for(take: Take, seconds: float) -> tuple[int, float]:
    count, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        count += take()
    return count, elapsed


def processor_s() -> float:
    """Return the processor time of this process and all below it, from the scheduler's own count in ns."""
    return sum(_own_s(pid) for pid in with_children(os.getpid()))


def _own_s(pid: int) -> float:
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9
    except FileNotFoundError:
        return 0.0


def with_children(pid: int) -> list[int]:
    """Return a process and all below it."""
    found = [pid]
    for thread in Path(f"/proc/{pid}/task").iterdir():
        for child in (thread / "children").read_text().split():
            found += with_children(int(child))
    return found
