"""The end of a process of envs: how it ended, and its last call."""

from __future__ import annotations

import os
from dataclasses import dataclass

from headrace.schemas.basics.signal_names import signal_name
from headrace.workers.envs.process.control import Phase

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
