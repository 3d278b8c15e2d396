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
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from headrace.workers.envs.process.channel import RING, STOP, DriverEnd
from headrace.workers.envs.process.child import STACK_SIGNAL
from headrace.workers.envs.process.control import NO_SEED, SLOTS, Command, Control, Phase, Slot
from headrace.workers.envs.process.exits import EnvCall, ProcessExit, describe_end, read_stack
from headrace.workers.envs.process.lifeline import tie_group
from headrace.workers.envs.process.output import OutputDrain
from headrace.workers.envs.process.process_envs import ProcessJob
from headrace.workers.envs.process.shared_arrays import new_memory
from headrace.workers.envs.process.wakeup_latch import WakeupLatch

_STACK_S = 0.2
"""How long a process that is to be killed has to write down where it stands."""
_LAST_OUTPUT_S = 0.2


class ProcessState(Enum):
    """Of the process, as its driver sees it."""

    SERVING = auto()
    CONDEMNED = auto()
    """Asked where it stands, and killed a moment later."""
    KILLED = auto()
    STOPPING = auto()
    """It has nothing left to do, and closes its envs."""


@dataclass(frozen=True, slots=True)
class ProcessOrder:
    """What a process was told to do at once, with lanes of the pool."""

    stepping: Sequence[int]
    is_awaited: bool
    """Whether there is a step or a reset in it."""


@dataclass(frozen=True, slots=True)
class ProcessReply:
    """That it has done so: what was written into the slot, and what was said besides."""

    order: ProcessOrder
    slot: Slot
    told: dict[str, Any]


class ProcessHandle:
    """One process, which runs the module `child`, with the lanes `first_lane` and following.

    Nothing here blocks but `bury`, for a moment.

    Raises `OSError` where the system has no room for another process or its descriptors.
    """

    def __init__(
        self,
        job: Mapping[str, Any],
        limits: Mapping[Phase, float],
        columns: int,
        drain: OutputDrain,
        latch: WakeupLatch,
        child: str,
    ) -> None:
        self.first_lane, self.lanes = int(job["first_lane"]), int(job["lanes"])
        self.members: set[int] = set()
        """Lanes of the pool that live here."""
        self.awaited = 0
        """Of the orders that are not answered, those with a step or a reset."""
        self.episodes = 0
        self.state = ProcessState.SERVING
        self.overdue: EnvCall | None = None
        self.fate = ""
        """Why it was killed, if that was not for being late."""
        self._limits = limits
        self._shortest_s = min(limits.values())
        self._queue: dict[int, tuple[Command, int]] = {}
        self._asked: deque[ProcessOrder] = deque()
        """Orders that are not answered, the oldest first."""
        self._posted = self._answered = 0
        self._step_all = ProcessOrder(range(self.first_lane, self.first_lane + self.lanes), is_awaited=True)
        self._asked_at = time.monotonic()
        self.check_at = self._asked_at + limits[Phase.START]
        """When `enforce` may have something to do, in monotonic seconds; never too late."""
        control = new_memory("headrace-control")
        self.control = Control(control, self.lanes, create=True)
        self.control.begin(-1, Phase.START)
        self.control.indices[:] = range(self.first_lane, self.first_lane + self.lanes)
        self._start(job, control, columns, drain, latch, child)

    def _start(
        self, job: Mapping[str, Any], control: int, columns: int, drain: OutputDrain, latch: WakeupLatch, child: str
    ) -> None:
        with contextlib.ExitStack() as given, contextlib.ExitStack() as kept:
            # What is given is closed here once the process has it; what is kept, only where it cannot be started.
            given.callback(os.close, control)
            ours, theirs = socket.socketpair()
            kept.callback(ours.close), given.callback(theirs.close)
            lifeline, self._lifeline = _closing(os.pipe2(os.O_CLOEXEC), given, kept)
            self._last_words, last_words = _closing(os.pipe2(os.O_CLOEXEC), kept, given)
            output, printed = _closing(os.pipe2(os.O_CLOEXEC), kept, given)
            (written,) = _closing([new_memory("headrace-job")], given)
            (bell,) = _closing([os.eventfd(0, os.EFD_CLOEXEC)], kept)
            (told,) = _closing([os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)], kept)
            inherited = {
                "socket": theirs.fileno(),
                "bell": bell,
                "told": told,
                "latch_tokens": latch.tokens,
                "latch_bell": latch.bell,
                "control": control,
                "columns": columns,
                "lifeline": lifeline,
                "last_words": last_words,
            }
            os.pwrite(written, ProcessJob(**job, **inherited).model_dump_json().encode(), 0)
            # -P: no module beside the current folder's files is to be taken for one of ours before the path is set.
            command = [sys.executable, "-P", "-m", child, str(written)]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=printed,
                pass_fds=[written, *inherited.values()],
                start_new_session=True,
            )
            self.pid = self._process.pid
            tie_group(lifeline, self.pid)
            self.pidfd = os.pidfd_open(self.pid)
            kept.pop_all()
        self.channel = DriverEnd(ours, bell, told)
        self._output = drain.watch(output)

    # -- messages -----------------------------------------------------------------------------------------------------

    def ask(self, lane: int, command: Command, seed: int = NO_SEED) -> None:
        """Have the lane do this with the next `flush`."""
        self._queue[lane] = command, seed

    def step_all(self, seeds: NDArray[np.int64]) -> None:
        """Have every lane step, now if that can be; `seeds` (lanes,): what `Command.STEP` says of them."""
        if self._queue or not self._takes_orders:
            for lane, seed in zip(self._step_all.stepping, seeds.tolist(), strict=True):
                self.ask(lane, Command.STEP, seed)
            return
        slot = self.control.slots[self._posted % SLOTS]
        slot.commands[:], slot.seeds[:] = Command.STEP, seeds
        self._post(self._step_all)

    def flush(self) -> None:
        """Order what was asked, unless too many orders are under way; then it is ordered after the next answer."""
        if not self._queue or not self._takes_orders:
            return
        commands, seeds = [int(Command.NONE)] * self.lanes, [NO_SEED] * self.lanes
        for lane, (command, seed) in self._queue.items():
            commands[lane - self.first_lane], seeds[lane - self.first_lane] = command, seed
        slot = self.control.slots[self._posted % SLOTS]
        slot.commands[:], slot.seeds[:] = commands, seeds
        stepping = [lane for lane, (command, _) in self._queue.items() if command is Command.STEP]
        resetting = any(command is Command.RESET for command, _ in self._queue.values())
        self._queue.clear()
        self._post(ProcessOrder(stepping, is_awaited=bool(stepping) or resetting))

    @property
    def _takes_orders(self) -> bool:
        return len(self._asked) < SLOTS and self.state is ProcessState.SERVING

    def _post(self, order: ProcessOrder) -> None:
        if not self._asked:
            self._asked_at = time.monotonic()
            self.check_at = self._asked_at + self._shortest_s
        self._asked.append(order)
        self._posted += 1
        self.awaited += order.is_awaited
        self.channel.send(RING)

    def receive(self) -> list[ProcessReply]:
        """What was answered since the last call, in the order in which it was asked."""
        answers = []
        for _ in range(self.channel.answers()):
            order = self._asked.popleft()
            slot = self.control.slots[self._answered % SLOTS]
            self._answered += 1
            self.awaited -= order.is_awaited
            size, told = slot.counts[1], {}
            if size:
                told = orjson.loads(bytes(slot.words[:size]) if size <= len(slot.words) else self.channel.message())
            answers.append(ProcessReply(order, slot, told))
        if self.state is ProcessState.SERVING and answers:
            self._asked_at = time.monotonic()
            self.check_at = self._asked_at + self._shortest_s if self._asked else math.inf
        return answers

    def listen(self) -> None:
        """Read what comes by the socket. A large answer takes its time; it is not the env that is late."""
        self.channel.listen()
        self._asked_at = time.monotonic()

    def stop(self, deadline: float) -> None:
        """Have it close its envs and end by `deadline`, in monotonic seconds, or be killed."""
        if self.state is ProcessState.SERVING:
            self.state, self.check_at = ProcessState.STOPPING, deadline
            self.channel.send(STOP)

    @property
    def is_busy(self) -> bool:
        """Whether it was asked for something that is not answered."""
        return self.state is not ProcessState.STOPPING and bool(self._asked or self._queue)

    @property
    def is_trusted(self) -> bool:
        """Whether what it says still counts; once it is condemned, all that it did is lost."""
        return self.state is ProcessState.SERVING

    # -- deadlines ----------------------------------------------------------------------------------------------------

    def enforce(self, now: float) -> None:
        """Condemn it when it is late, and kill what is condemned."""
        if now < self.check_at:
            return
        if self.state is not ProcessState.SERVING:
            self.kill()
            return
        lane, phase, since = self.control.doing
        if not self._asked and phase is not Phase.START:
            self.check_at = math.inf
            return
        self.check_at = max(since, self._asked_at) + self._limits[phase]
        if now >= self.check_at:
            self.overdue = EnvCall(self.first_lane + lane if lane >= 0 else None, phase)
            self.state, self.check_at = ProcessState.CONDEMNED, now + _STACK_S
            self._signal(STACK_SIGNAL)

    def kill(self, fate: str = "") -> None:
        """End it and all that it started. Its pidfd tells when that is done."""
        self.fate = fate or self.fate
        self.state, self.check_at = ProcessState.KILLED, math.inf
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    # -- the end ------------------------------------------------------------------------------------------------------

    def bury(self) -> ProcessExit:
        """Once `pidfd` is readable: reap it, kill what it leaves behind, release everything; how it ended."""
        os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)  # not reaped yet, so the group is still its own
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        returncode = self._process.wait()
        stack = read_stack(self._last_words)
        self._output.finished.wait(_LAST_OUTPUT_S)
        lane, phase, _ = self.control.doing
        self.channel.close()
        for descriptor in (self.pidfd, self._lifeline, self._last_words):
            os.close(descriptor)
        doing = EnvCall(self.first_lane + lane if lane >= 0 else None, phase)
        cause, late = self.fate or describe_end(returncode), self.overdue is not None
        return ProcessExit(self.pid, cause, self.overdue or doing, late, stack, self._output.text())


def _closing(descriptors: Sequence[int], *stacks: contextlib.ExitStack) -> Sequence[int]:
    """Have each closed with its stack."""
    for descriptor, stack in zip(descriptors, stacks, strict=True):
        stack.callback(os.close, descriptor)
    return descriptors
