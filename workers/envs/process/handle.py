"""The driver's handle of one process of envs: its start, its messages, its deadlines and its end."""

from __future__ import annotations

import contextlib
import math
import os
import signal
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

from headrace.workers.envs.process.channel import RING, STOP, DriverEnd, tie_group
from headrace.workers.envs.process.child import STACK_SIGNAL
from headrace.workers.envs.process.control import NO_SEED, SLOTS, Command, Control, Phase, Slot
from headrace.workers.envs.process.exits import EnvCall, ProcessExit, describe_end, read_stack
from headrace.workers.envs.process.output import OutputDrain
from headrace.workers.envs.process.process_envs import ProcessJob
from headrace.workers.envs.process.shared_arrays import new_memory
from headrace.workers.envs.process.wakeup_latch import WakeupLatch

_PROGRAM = "headrace.workers.envs.process.child"
_STACK_S = 0.2
"""Seconds that a process has to write its stack before it is killed."""
_LAST_OUTPUT_S = 0.2


class HandleState(Enum):
    """The state of a process, as its driver sees it."""

    SERVING = auto()
    CONDEMNED = auto()
    """It missed a deadline and was asked for its stack. It is killed a moment later."""
    KILLED = auto()
    STOPPING = auto()
    """It has no more orders, and closes its envs."""


@dataclass(frozen=True, slots=True)
class ProcessOrder:
    """One order to a process, with lanes of the pool."""

    stepping: Sequence[int]
    is_awaited: bool
    """True if it has a step or a reset, so that a poll waits for it."""


@dataclass(frozen=True, slots=True)
class ProcessReply:
    """The reply to one order: the slot, and the part sent as JSON."""

    order: ProcessOrder
    slot: Slot
    told: dict[str, Any]


class ProcessHandle:
    """One process, with the lanes from `first_lane` on.

    Only `bury` blocks, for a moment.

    Raises `OSError` where the system has no room for another process or its descriptors.
    """

    def __init__(
        self,
        job: Mapping[str, Any],
        limits: Mapping[Phase, float],
        columns: int,
        drain: OutputDrain,
        latch: WakeupLatch,
    ) -> None:
        self.first_lane, self.lanes = int(job["first_lane"]), int(job["lanes"])
        self.members: set[int] = set()
        """Lanes of the pool whose env is in this process."""
        self.awaited = 0
        """Number of orders without a reply that have a step or a reset."""
        self.episodes = 0
        self.state = HandleState.SERVING
        self.overdue: EnvCall | None = None
        self.fate = ""
        """Reason for which it was killed, if it was not late."""
        self._limits = limits
        self._shortest_s = min(limits.values())
        self._queue: dict[int, tuple[Command, int]] = {}
        self._tasks: dict[int, Mapping[str, Any] | None] = {}
        """Lane of the process -> values for its resets, which the next order tells."""
        self._asked: deque[ProcessOrder] = deque()
        """Orders without a reply, the oldest first."""
        self._posted = self._answered = 0
        self._step_all = ProcessOrder(range(self.first_lane, self.first_lane + self.lanes), is_awaited=True)
        self._asked_at = time.monotonic()
        self.check_at = self._asked_at + limits[Phase.START]
        """The earliest time at which `enforce` may have something to do, in monotonic seconds."""
        control = new_memory("headrace-control")
        self.control = Control(control, self.lanes, create=True)
        self.control.begin(-1, Phase.START)
        first = self.first_lane + int(job.get("first_index", 0))
        self.control.indices[:] = range(first, first + self.lanes)
        self._start(job, control, columns, drain, latch)

    def _start(
        self, job: Mapping[str, Any], control: int, columns: int, drain: OutputDrain, latch: WakeupLatch
    ) -> None:
        with contextlib.ExitStack() as given, contextlib.ExitStack() as kept:
            # `given` is closed here once the process has it, `kept` only if the process cannot be started.
            given.callback(os.close, control)
            lifeline, self._lifeline = _closing(os.pipe2(os.O_CLOEXEC), given, kept)
            self._last_words, last_words = _closing(os.pipe2(os.O_CLOEXEC), kept, given)
            output, printed = _closing(os.pipe2(os.O_CLOEXEC), kept, given)
            (written,) = _closing([new_memory("headrace-job")], given)
            (bell,) = _closing([os.eventfd(0, os.EFD_CLOEXEC)], kept)
            (told,) = _closing([os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)], kept)
            (replies,) = _closing([new_memory("headrace-replies")], kept)
            inherited = {
                "bell": bell,
                "told": told,
                "replies": replies,
                "latch_tokens": latch.tokens,
                "latch_bell": latch.bell,
                "control": control,
                "columns": columns,
                "lifeline": lifeline,
                "last_words": last_words,
            }
            os.pwrite(written, ProcessJob(**job, **inherited).model_dump_json().encode(), 0)
            # -P: before `sys.path` is set, no file in the current folder can be imported in place of one of ours.
            command = [sys.executable, "-P", "-m", _PROGRAM, str(written)]
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
        self.channel = DriverEnd(bell, told, replies)
        self._output = drain.watch(output)

    # -- messages -----------------------------------------------------------------------------------------------------

    def ask(self, lane: int, command: Command, seed: int = NO_SEED) -> None:
        """Add `command` for the lane to the next `flush`."""
        self._queue[lane] = command, seed

    def tell_task(self, lane: int, values: Mapping[str, Any] | None) -> None:
        """Tell the task for the lane's resets with the next order."""
        self._tasks[lane - self.first_lane] = values

    def step_all(self, seeds: NDArray[np.int64]) -> None:
        """Step every lane, now if possible. `seeds` (lanes,): see `Command.STEP`."""
        if self._queue or not self._takes_orders:
            for lane, seed in zip(self._step_all.stepping, seeds.tolist(), strict=True):
                self.ask(lane, Command.STEP, seed)
            return
        slot = self.control.slots[self._posted % SLOTS]
        slot.commands[:], slot.seeds[:] = Command.STEP, seeds
        self._post(self._step_all)

    def flush(self) -> None:
        """Send the queued commands as one order. If too many are under way, a later call sends it after a reply."""
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
        return len(self._asked) < SLOTS and self.state is HandleState.SERVING

    def _post(self, order: ProcessOrder) -> None:
        if not self._asked:
            self._asked_at = time.monotonic()
            self.check_at = self._asked_at + self._shortest_s
        if self._tasks:
            body, slot = orjson.dumps([*self._tasks.items()]), self.control.slots[self._posted % SLOTS]
            slot.tasks[: len(body)], slot.counts[2] = np.frombuffer(body, np.uint8), len(body)
            self._tasks.clear()
        self._asked.append(order)
        self._posted += 1
        self.awaited += order.is_awaited
        self.channel.send(RING)

    def receive(self) -> list[ProcessReply]:
        """Return the replies since the last call, in the order of their orders."""
        answers, has_long = [], False
        for _ in range(self.channel.replies()):
            order = self._asked.popleft()
            slot = self.control.slots[self._answered % SLOTS]
            self._answered += 1
            self.awaited -= order.is_awaited
            size, told = slot.counts[1], {}
            if size:
                is_long = size > len(slot.words)
                body = self.channel.long_reply(slot.index, size) if is_long else bytes(slot.words[:size])
                told, has_long = orjson.loads(body), has_long or is_long
            answers.append(ProcessReply(order, slot, told))
        if has_long and not self._asked:
            self.channel.free()
        if self.state is HandleState.SERVING and answers:
            self._asked_at = time.monotonic()
            self.check_at = self._asked_at + self._shortest_s if self._asked else math.inf
        return answers

    def stop(self, deadline: float) -> None:
        """Stop the process after it has closed its envs. It is killed at `deadline`, in monotonic seconds."""
        if self.state is HandleState.SERVING:
            self.state, self.check_at = HandleState.STOPPING, deadline
            self.channel.send(STOP)

    @property
    def is_busy(self) -> bool:
        """Return whether the process has commands without a reply."""
        return self.state is not HandleState.STOPPING and bool(self._asked or self._queue)

    @property
    def is_trusted(self) -> bool:
        """Return whether the process's replies still count: not once it is condemned."""
        return self.state is HandleState.SERVING

    # -- deadlines ----------------------------------------------------------------------------------------------------

    def enforce(self, now: float) -> None:
        """Condemn the process if it misses its deadline, and kill it if it was condemned before."""
        if now < self.check_at:
            return
        if self.state is not HandleState.SERVING:
            self.kill()
            return
        lane, phase, since = self.control.doing
        if not self._asked and phase is not Phase.START:
            self.check_at = math.inf
            return
        self.check_at = max(since, self._asked_at) + self._limits[phase]
        if now >= self.check_at:
            self.overdue = EnvCall(self.first_lane + lane if lane >= 0 else None, phase)
            self.state, self.check_at = HandleState.CONDEMNED, now + _STACK_S
            self._signal(STACK_SIGNAL)

    def kill(self, fate: str = "") -> None:
        """Kill the process and its process group. Its pidfd reports when it has ended."""
        self.fate = fate or self.fate
        self.state, self.check_at = HandleState.KILLED, math.inf
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    # -- the end ------------------------------------------------------------------------------------------------------

    def bury(self) -> ProcessExit:
        """Reap the ended process, kill the rest of its group, and return how it ended. Its `pidfd` must be readable."""
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
    """Close each descriptor with its stack, and return them."""
    for descriptor, stack in zip(descriptors, stacks, strict=True):
        stack.callback(os.close, descriptor)
    return descriptors
