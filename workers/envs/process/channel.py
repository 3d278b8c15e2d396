"""Bells and a file between a driver and one process of envs, and the tie by which the process dies with its driver.

    to the process     `bell`, an eventfd: each order that was written adds RING; STOP means that the process must end
    from the process   `told`, an eventfd: each order that was obeyed adds one, in order; then the latch counts down
                       a file in memory, for replies in JSON that do not fit their place in shared memory: the reply in
                       slot n begins at byte n * 2**40, and is all there before `told` is rung

Everything large is in shared memory. A process that hears a bell sees everything that was written there before.

Bells are no sockets: a socket's wake-up tells the scheduler that the sender is about to sleep. The scheduler then puts
the process that wakes onto the driver's core, though the driver has others to wake and another core is idle.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import time

from headrace.workers.envs.process.wakeup_latch import count_down

RING, STOP = 1, 1 << 32

_PLACE = 1 << 40
"""Bytes from one long reply's place to the next. Bytes that were never written take no memory."""
_MOMENT_NS, _TURN_NS, _NAP = 300_000, 1_000_000, 1000


class DriverEnd:
    """The driver's end. Never blocks."""

    def __init__(self, bell: int, told: int, replies: int) -> None:
        self._bell, self.told, self._replies = bell, told, replies

    def send(self, signal: int) -> None:
        """Send RING or STOP. Ignore a process that has ended, because its pidfd reports that."""
        os.eventfd_write(self._bell, signal)

    def replies(self) -> int:
        """Return how many more orders were obeyed."""
        try:
            return os.eventfd_read(self.told)
        except BlockingIOError:
            return 0

    def long_reply(self, slot: int, size: int) -> bytes:
        """Return the reply in the file. Call it only for an obeyed order: then it is there."""
        return os.pread(self._replies, size, slot * _PLACE)

    def free(self) -> None:
        """Free the memory of long replies, all of which were read. The process must have no order."""
        os.truncate(self._replies, 0)

    def close(self) -> None:
        """Close the file and both eventfds."""
        for descriptor in (self._bell, self.told, self._replies):
            os.close(descriptor)


class ProcessEnd:
    """The end of the process of envs. Blocks."""

    def __init__(self, bell: int, told: int, replies: int, latch: tuple[int, int]) -> None:
        self._bell, self._told, self._replies, self._latch = bell, told, replies, latch
        self._sleep = select.poll()
        self._sleep.register(bell, select.POLLIN)
        self._is_brisk, self._to_sleep = False, 0
        os.set_blocking(bell, False)

    def wait(self) -> int:
        """Return how many more orders there are, or 0 for STOP. The process dies with its driver.

        Waking up takes longer than a cheap env's step. If the last order came within `_MOMENT_NS`, the process spins
        that long for the next one; otherwise it sleeps. While it spins, it yields the core to other processes. If
        another process used the core, this one sleeps for the next `_NAP` orders: the kernel runs sleepers first.
        """
        began = now = time.perf_counter_ns()
        rung = self._rung()
        while not rung and self._is_brisk and now - began < _MOMENT_NS:
            os.sched_yield()
            before, now = now, time.perf_counter_ns()
            if now - before > _TURN_NS:
                self._to_sleep = _NAP
            rung = self._rung()
        if not rung:
            self._sleep.poll()
            rung = self._rung()
        self._to_sleep = max(self._to_sleep - 1, 0)
        self._is_brisk = not self._to_sleep and time.perf_counter_ns() - began < _MOMENT_NS
        return rung if rung < STOP else 0

    def _rung(self) -> int:
        try:
            return os.eventfd_read(self._bell)
        except BlockingIOError:
            return 0

    def send(self, slot: int, body: bytes) -> None:
        """Write the long reply of a slot."""
        os.pwrite(self._replies, body, slot * _PLACE)

    def reply(self) -> None:
        """Report that one more order was obeyed."""
        os.eventfd_write(self._told, 1)
        count_down(*self._latch)


_F_SETSIG = 10


def tie_group(lifeline: int, group: int) -> None:
    """Have a process group killed when its parent dies, however the parent dies.

    The parent holds the writing end of a pipe and never writes. `lifeline`, the reading end, is held by a process of
    the group. When the parent dies, the kernel closes the writing end, and sends SIGKILL to the whole group. Unlike
    PR_SET_PDEATHSIG, this reaches grandchildren, and the end of the thread that started a process has no effect. It
    needs no thread and no interpreter lock, so a child that hangs in C dies too.

    The parent calls it, in case the process is stopped as it starts. The process calls it too, in case its parent is
    gone.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -group)
    fcntl.fcntl(lifeline, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    poll = select.poll()
    poll.register(lifeline, 0)
    if poll.poll(0):  # the parent was gone before the signal was set up
        os.killpg(group, signal.SIGKILL)
