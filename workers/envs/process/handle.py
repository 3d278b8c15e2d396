"""The driver's handle of one process of envs: its start, its messages, its deadlines and its end."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from headrace.workers.envs.process.channel import RING, STOP, DriverEnd
from headrace.workers.envs.process.child import STACK_SIGNAL
from headrace.workers.envs.process.control import NO_SEED, Command, Control, Phase
from headrace.workers.envs.process.host import HostJob
from headrace.workers.envs.process.output import OutputDrain
from headrace.workers.envs.process.shared import new_memory

_STACK_S = 0.2
"""How long a process that is to be killed has to write down where it stands."""
_LAST_OUTPUT_S = 0.2
_STACK_BYTES = 1 << 16


class State(Enum):
    """Of the process, as its driver sees it."""

    SERVING = auto()
    CONDEMNED = auto()
    """Asked where it stands, and killed a moment later."""
    KILLED = auto()
    STOPPING = auto()
    """It has nothing left to do, and closes its envs."""


@dataclass(frozen=True, slots=True)
class Call:
    """What a process was doing; `lane` is one of the pool, or None."""

    lane: int | None
    phase: Phase


class ProcessHandle:
    """One process, with the lanes `first_lane` and following. Nothing here blocks but `bury`, for a moment."""

    def __init__(self, job: Mapping[str, Any], limits: Mapping[Phase, float], columns: int, drain: OutputDrain) -> None:
        self.first_lane, self.lanes = int(job["first_lane"]), int(job["lanes"])
        self.members: set[int] = set()
        """Lanes of the pool that live here."""
        self.asked: dict[int, Command] = {}
        """What each lane was told, for as long as that is not answered."""
        self.episodes = 0
        self.state = State.SERVING
        self.overdue: Call | None = None
        self.fate = ""
        """Why it was killed, if that was not for being late."""
        self._limits = limits
        self._shortest_s = min(limits.values())
        self._queue: dict[int, tuple[Command, int]] = {}
        self._asked_at = time.monotonic()
        self.check_at = self._asked_at + limits[Phase.CONSTRUCTION]
        """When `enforce` may have something to do, in monotonic seconds; never too late."""
        control = new_memory("headrace-control")
        self.control = Control(control, self.lanes, create=True)
        self.control.begin(-1, Phase.CONSTRUCTION)
        self.control.indices[:] = range(self.first_lane, self.first_lane + self.lanes)
        self._start(job, control, columns, drain)

    def _start(self, job: Mapping[str, Any], control: int, columns: int, drain: OutputDrain) -> None:
        ours, theirs = socket.socketpair()
        lifeline, self._lifeline = os.pipe2(os.O_CLOEXEC)
        self._last_words, last_words = os.pipe2(os.O_CLOEXEC)
        output, printed = os.pipe2(os.O_CLOEXEC)
        told, bell = new_memory("headrace-job"), os.eventfd(0, os.EFD_CLOEXEC)
        inherited = {
            "socket": theirs.fileno(),
            "bell": bell,
            "control": control,
            "columns": columns,
            "lifeline": lifeline,
            "last_words": last_words,
        }
        os.pwrite(told, HostJob(**job, **inherited).model_dump_json().encode(), 0)
        # -P: no module beside the current folder's files is to be taken for one of ours before the path is set.
        command = [sys.executable, "-P", "-m", "headrace.workers.envs.process.child", str(told)]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=printed,
                pass_fds=[told, *inherited.values()],
                start_new_session=True,
            )
        finally:
            theirs.close()
            for descriptor in (control, lifeline, last_words, printed, told):
                os.close(descriptor)
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)
        self.channel = DriverEnd(ours, bell)
        self._output = drain.watch(output)

    # -- messages -----------------------------------------------------------------------------------------------------

    def ask(self, lane: int, command: Command, seed: int = NO_SEED) -> None:
        """Have the lane do this with the next `flush`."""
        self._queue[lane] = command, seed

    def flush(self) -> None:
        """Send what was asked, unless an answer is still to come; then it is sent after that."""
        if not self._queue or self.asked or self.state is not State.SERVING:
            return
        commands, seeds = [int(Command.NONE)] * self.lanes, [NO_SEED] * self.lanes
        for lane, (command, seed) in self._queue.items():
            commands[lane - self.first_lane], seeds[lane - self.first_lane] = command, seed
            self.asked[lane] = command
        self.control.commands[:], self.control.seeds[:] = commands, seeds
        self._queue.clear()
        self._asked_at = time.monotonic()
        self.check_at = self._asked_at + self._shortest_s
        self.channel.send(RING)

    def receive(self) -> tuple[dict[int, Command], dict[str, Any]] | None:
        """(what each lane was told, the answer), once it is complete; call it when the channel is readable."""
        answer = self.channel.receive()
        if answer is None:
            if not self.channel.is_over:
                self._asked_at = time.monotonic()  # a large one that takes its time; it is not the env that is late
            return None
        asked, self.asked = self.asked, {}
        if self.state is State.SERVING:
            self.check_at = math.inf
        return asked, answer

    def stop(self, deadline: float) -> None:
        """Have it close its envs and end by `deadline`, in monotonic seconds, or be killed."""
        if self.state is State.SERVING:
            self.state, self.check_at = State.STOPPING, deadline
            self.channel.send(STOP)

    @property
    def is_busy(self) -> bool:
        """Whether it was asked for something that is not answered."""
        return self.state is not State.STOPPING and bool(self.asked or self._queue)

    @property
    def is_trusted(self) -> bool:
        """Whether what it says still counts; once it is condemned, all that it did is lost."""
        return self.state is State.SERVING

    @property
    def is_awaited(self) -> bool:
        """Whether an answer to a step or a reset is to come."""
        return any(command in (Command.STEP, Command.RESET) for command in self.asked.values())

    # -- deadlines ----------------------------------------------------------------------------------------------------

    def enforce(self, now: float) -> None:
        """Condemn it when it is late, and kill what is condemned."""
        if now < self.check_at:
            return
        if self.state is not State.SERVING:
            self.kill()
            return
        lane, phase, since = self.control.doing
        if not self.asked and phase is not Phase.CONSTRUCTION:
            self.check_at = math.inf
            return
        self.check_at = max(since, self._asked_at) + self._limits[phase]
        if now >= self.check_at:
            self.overdue = Call(self.first_lane + lane if lane >= 0 else None, phase)
            self.state, self.check_at = State.CONDEMNED, now + _STACK_S
            self._signal(STACK_SIGNAL)

    def kill(self, fate: str = "") -> None:
        """End it and all that it started. Its pidfd tells when that is done."""
        self.fate = fate or self.fate
        self.state, self.check_at = State.KILLED, math.inf
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    # -- the end ------------------------------------------------------------------------------------------------------

    def bury(self) -> Ending:
        """Once `pidfd` is readable: reap it, kill what it leaves behind, release everything; how it ended."""
        os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)  # not reaped yet, so the group is still its own
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        returncode = self._process.wait()
        stack = _read_stack(self._last_words)
        self._output.finished.wait(_LAST_OUTPUT_S)
        lane, phase, _ = self.control.doing
        self.channel.close()
        for descriptor in (self.pidfd, self._lifeline, self._last_words):
            os.close(descriptor)
        doing = Call(self.first_lane + lane if lane >= 0 else None, phase)
        cause, late = self.fate or describe_end(returncode), self.overdue is not None
        return Ending(self.pid, cause, self.overdue or doing, late, stack, self._output.text())


@dataclass(frozen=True, slots=True)
class Ending:
    """How a process ended, in what call, and its last words."""

    pid: int
    cause: str
    call: Call
    was_late: bool
    """It was killed because that call did not return."""
    stack: str
    output: str


def describe_end(returncode: int) -> str:
    """A return code in words: "signal SIGKILL", "exit code 4"."""
    return f"exit code {returncode}" if returncode >= 0 else f"signal {signal.Signals(-returncode).name}"


def _read_stack(pipe: int) -> str:
    os.set_blocking(pipe, False)
    try:
        return os.read(pipe, _STACK_BYTES).decode(errors="replace")
    except BlockingIOError:  # something that escaped holds the other end
        return ""
