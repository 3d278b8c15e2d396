"""All processes of a pool: starts them, waits for them, kills those that miss a deadline, and reaps them."""

from __future__ import annotations

import logging
import math
import os
import select
import time
from collections.abc import Iterator, Mapping
from typing import Any

from headrace.schemas.basics.dropped import when_dropped
from headrace.schemas.errors import EnvError
from headrace.workers.envs.process.control import Phase
from headrace.workers.envs.process.exits import ProcessExit
from headrace.workers.envs.process.handle import HandleState, ProcessHandle
from headrace.workers.envs.process.output import OutputDrain
from headrace.workers.envs.process.shared_arrays import new_memory
from headrace.workers.envs.process.wakeup_latch import WakeupLatch

logger = logging.getLogger(__name__)


class Processes:
    """The processes of a pool.

    `memory` will hold all lanes' columns. If they are dropped without `stop`, they are killed.
    """

    def __init__(self, job: Mapping[str, Any], limits: Mapping[Phase, float]) -> None:
        self._job = job
        self._limits = limits
        self._handles: dict[int, ProcessHandle] = {}
        self._by_descriptor: dict[int, ProcessHandle] = {}
        self.memory = new_memory("headrace-columns")
        self._drain = OutputDrain()
        self._latch = WakeupLatch()
        self._epoll = select.epoll()
        """Wakes the driver: the latch's bell, and ends of processes."""
        self._epoll.register(self._latch.bell, select.EPOLLIN)
        self._told = select.epoll()
        """Tells which processes have replied. The driver does not sleep for it."""
        parts = self._handles, self._drain, self._latch, self.memory
        self._dropped = when_dropped(self, "processes of envs were dropped without stop()", _end_dropped, *parts)

    def __iter__(self) -> Iterator[ProcessHandle]:
        """Iterate over the handles of the processes that run."""
        return iter(self._handles.values())

    def fileno(self) -> int:
        """Return a descriptor that is readable when `wait` would not block. It does not show deadlines."""
        return self._epoll.fileno()

    def start(self, first_lane: int, lanes: int) -> ProcessHandle:
        """Start a process for these lanes, and return its handle. The process imports its modules in the background.

        Raises `EnvError` where the system has no room for it.
        """
        job = {**self._job, "first_lane": first_lane, "lanes": lanes}
        try:
            handle = ProcessHandle(job, self._limits, self.memory, self._drain, self._latch)
        except OSError as error:
            raise EnvError(
                f"no process could be started for envs {first_lane} to {first_lane + lanes - 1}: {error}; raise the "
                "limit it names (`ulimit -n` for open files, 8 of each process; `ulimit -u` for processes), or "
                "envs_per_process"
            ) from error
        self._handles[handle.pid] = handle
        for epoll, descriptor in ((self._epoll, handle.pidfd), (self._told, handle.channel.told)):
            self._by_descriptor[descriptor] = handle
            epoll.register(descriptor, select.EPOLLIN)
        return handle

    def wait(self, until: float, replies: int = 1) -> tuple[list[ProcessHandle], list[ProcessHandle]]:
        """Return the processes that have replied, and those that have ended.

        Sleeps until there are this many `replies`, or until `until`, in monotonic seconds. Returns earlier, perhaps
        with nothing, when a process had replied since the last call, has ended, or may be late.
        """
        timeout = max(min([until, *(handle.check_at for handle in self)]) - time.monotonic(), 0.0)
        woken = self._sleep(timeout, replies)
        ended = [self._by_descriptor[descriptor] for descriptor in woken if descriptor != self._latch.bell]
        return [self._by_descriptor[descriptor] for descriptor, _ in self._told.poll(0)], ended

    def _sleep(self, timeout_s: float, replies: int) -> list[int]:
        """Sleep, and return the descriptors that have woken the driver. Afterwards each reply rings the bell."""
        if timeout_s:
            self._latch.arm(replies)
        try:
            woken = [descriptor for descriptor, _ in self._epoll.poll(timeout_s if timeout_s != math.inf else None)]
        except BaseException:  # a signal's handler has raised
            self._latch.disarm()
            self._latch.ring()  # for processes that replied without ringing
            raise
        self._latch.disarm()
        return woken

    def enforce(self) -> None:
        """Kill processes that missed a deadline. Call it after reading all replies that `wait` returned."""
        now = time.monotonic()
        for handle in self:
            handle.enforce(now)

    def bury(self, handle: ProcessHandle) -> ProcessExit:
        """Release a process that has ended, and return how it ended."""
        for epoll, descriptor in ((self._epoll, handle.pidfd), (self._told, handle.channel.told)):
            del self._by_descriptor[descriptor]
            epoll.unregister(descriptor)
        del self._handles[handle.pid]
        return handle.bury()

    def stop(self, timeout_s: float) -> None:
        """Stop all processes. Kill those whose envs do not close within `timeout_s` seconds. Release all resources."""
        self._dropped.detach()
        deadline = time.monotonic() + timeout_s
        for handle in self:
            handle.stop(deadline)
        while self._handles:
            for handle in (waited := self.wait(math.inf))[0]:
                handle.receive()
            for handle in waited[1]:
                if handle.state is HandleState.KILLED:
                    lanes = f"{handle.first_lane} to {handle.first_lane + handle.lanes - 1}"
                    logger.warning("the process of envs %s did not end within %g s and was killed", lanes, timeout_s)
                self.bury(handle)
            self.enforce()
        self._epoll.close()
        self._told.close()
        _release(self._drain, self._latch, self.memory)


def _end_dropped(handles: dict[int, ProcessHandle], drain: OutputDrain, latch: WakeupLatch, memory: int) -> None:
    for handle in handles.values():
        handle.kill("dropped")
    for handle in handles.values():
        handle.bury()
    _release(drain, latch, memory)


def _release(drain: OutputDrain, latch: WakeupLatch, memory: int) -> None:
    drain.stop()
    latch.close()
    os.close(memory)
