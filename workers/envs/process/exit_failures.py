"""The failures of all envs of a process that has ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from headrace.schemas.errors import EnvCrashError, EnvError, EnvHangError, EnvNeighbourError
from headrace.workers.envs.failures import Failure
from headrace.workers.envs.process.control import Phase
from headrace.workers.envs.process.exits import ProcessExit
from headrace.workers.envs.process.job_settings import SETTINGS


def failures_of(ending: ProcessExit, lanes: Iterable[int], limits: Mapping[Phase, float]) -> list[Failure]:
    """Return one failure for each of `lanes`. The first is of the env whose call did not return, if there is one.

    The others are then `EnvNeighbourError`. This first env may not be among `lanes`: it was being closed.
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
