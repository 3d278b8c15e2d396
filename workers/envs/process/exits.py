"""The end of a process of envs: its cause, its last call, and the failures of its envs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from headrace.schemas.basics.stop_event import signal_name
from headrace.schemas.errors import EnvCrashError, EnvError, EnvHangError, EnvNeighbourError
from headrace.workers.envs.failures import Failure
from headrace.workers.envs.process.control import Phase
from headrace.workers.envs.process.job_settings import SETTINGS

_STACK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class EnvCall:
    """The phase of a process when it ended. `lane` is one of the pool, or None."""

    lane: int | None
    phase: Phase


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """The end of a process: its cause, the call under way, the Python stack and the last output."""

    pid: int
    cause: str
    call: EnvCall
    was_late: bool
    """True if it was killed because the call did not return."""
    stack: str
    output: str


def describe_end(returncode: int) -> str:
    """Return a return code in words: "signal SIGKILL", "exit code 4"."""
    return f"exit code {returncode}" if returncode >= 0 else f"signal {signal_name(-returncode)}"


def read_stack(pipe: int) -> str:
    """Return the stack that a process has written into `pipe`, or "" if it has written none."""
    os.set_blocking(pipe, False)
    try:
        return os.read(pipe, _STACK_BYTES).decode(errors="replace")
    except BlockingIOError:  # a process that escaped holds the other end
        return ""


def failures_of(ending: ProcessExit, lanes: Iterable[int], limits: Mapping[Phase, float]) -> list[Failure]:
    """Return one failure for each of `lanes`. The env whose call did not return comes first, if there is one.

    All other lanes then fail with `EnvNeighbourError`. That env may be missing from `lanes`, because it was being
    closed.
    """
    lanes = sorted(lanes, key=lambda lane: (lane != ending.call.lane, lane))
    culprit = ending.call.lane if ending.call.phase is not Phase.IDLE else None
    failures = []
    for lane in lanes:
        if culprit is None or lane == culprit:
            failures.append(Failure(lane, _error(ending, lane, limits), at=ending.call.phase.name.lower()))
        else:
            failures.append(Failure(lane, EnvNeighbourError(culprit, _brief(ending)), at="no call of its own"))
    return failures


def _error(ending: ProcessExit, lane: int, limits: Mapping[Phase, float]) -> EnvError:
    phase = ending.call.phase
    if ending.was_late:
        return EnvHangError(lane, phase.name.lower(), limits[phase], SETTINGS[phase], ending.stack)
    during = "between two calls" if phase is Phase.IDLE else f"in {phase.name.lower()}"
    return EnvCrashError(ending.pid, ending.cause, during, ending.stack, ending.output)


def _brief(ending: ProcessExit) -> str:
    return f"it hung in {ending.call.phase.name.lower()}" if ending.was_late else ending.cause
