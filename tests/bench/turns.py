"""Arms of a comparison take turns in one run: the machine drifts, so only ratios within a round mean anything."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time, sleep
from typing import Protocol

WARM = 0.4
"""Warm-up before each turn, as a share of the turn. It is not counted: queues empty and caches get warm."""


_REST_S = 0.2
_REST_SHARE = 0.1
_REST_DEADLINE_S = 20.0
"""An arm is at rest when each of its processes uses less than this share of a core for this long, on average.

Processes that wait still look around some 20 times a second, which costs 5 to 9 % of a slow core.
"""


class Arm(Protocol):
    """One side of a comparison. Backpressure stops its processes while no one receives their output."""

    pids: Mapping[str, int]
    """Its processes other than this one, by role."""

    def begin(self) -> None:
        """Start the turn."""
        ...

    def take(self) -> int:
        """Take one message; return the amount that it held."""
        ...

    def end(self) -> None:
        """End the turn."""
        ...


@dataclass(frozen=True, slots=True)
class Turn:
    """The result of one turn. The rate per processor time holds on a busy machine too."""

    rate: float
    """Per second."""
    per_cpu_s: float
    """Per second of processor time of all its processes and this one."""


def in_turns(arms: Mapping[str, Arm], seconds: float, rounds: int) -> list[dict[str, Turn]]:
    """Run turns of all arms, round by round. A turn starts only when the arm before it is at rest."""
    for arm in arms.values():
        turn(arm, seconds * WARM)
    return [{name: turn(arm, seconds) for name, arm in arms.items()} for _ in range(rounds)]


def turn(arm: Arm, seconds: float) -> Turn:
    """Let the arm warm up, then measure it for `seconds`."""
    pids = [os.getpid(), *arm.pids.values()]
    arm.begin()
    _take_for(arm, seconds * WARM)
    before = cpu_s(pids)
    count, elapsed = _take_for(arm, seconds)
    spent = cpu_s(pids) - before
    arm.end()
    rest(arm.pids.values())
    return Turn(count / elapsed, count / spent)


class Loop(Protocol):
    """One side of a comparison within this process."""

    def run(self, seconds: float) -> float:
        """Run for `seconds`; return the rate per second."""
        ...


def loops_in_turns(loops: Mapping[str, Loop], seconds: float, rounds: int) -> list[dict[str, Turn]]:
    """Run turns of all loops, round by round."""
    for loop in loops.values():
        loop.run(seconds / 4)
    return [{name: _turn_here(loop, seconds) for name, loop in loops.items()} for _ in range(rounds)]


def _turn_here(loop: Loop, seconds: float) -> Turn:
    start, before = perf_counter(), process_time()
    rate = loop.run(seconds)
    return Turn(rate, rate * (perf_counter() - start) / (process_time() - before))


def _take_for(arm: Arm, seconds: float) -> tuple[int, float]:
    count, start = 0, perf_counter()
    while (elapsed := perf_counter() - start) < seconds:
        count += arm.take()
    return count, elapsed


def rest(pids: Iterable[int]) -> None:
    """Wait until these processes have nothing to do: their queues are full."""
    pids, deadline = list(pids), perf_counter() + _REST_DEADLINE_S
    before = cpu_s(pids)
    while perf_counter() < deadline:
        sleep(_REST_S)
        now = cpu_s(pids)
        if now - before <= _REST_SHARE * len(pids) * _REST_S:
            return
        before = now
    raise TimeoutError(f"processes {pids} are busy {_REST_DEADLINE_S} s after their turn")


def cpu_s(pids: Iterable[int]) -> float:
    """Processor time of all threads, from the scheduler's own count in ns."""
    threads = (thread for pid in pids for thread in Path(f"/proc/{pid}/task").iterdir())
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9
