"""All processes of a pool: started, listened to, kept to their deadlines and buried."""

from __future__ import annotations

import logging
import math
import os
import select
import time
from collections.abc import Iterator, Mapping
from typing import Any

from headrace.workers.envs.process.control import Phase
from headrace.workers.envs.process.handle import Ending, ProcessHandle, State
from headrace.workers.envs.process.output import OutputDrain
from headrace.workers.envs.process.shared import new_memory

logger = logging.getLogger(__name__)


class Processes:
    """Iterates over the handles of those that run. `memory` is where all lanes' columns will be."""

    def __init__(self, job: Mapping[str, Any], limits: Mapping[Phase, float]) -> None:
        self._job = job
        self._limits = limits
        self._handles: dict[int, ProcessHandle] = {}
        self._by_descriptor: dict[int, ProcessHandle] = {}
        self.memory = new_memory("headrace-columns")
        self._drain = OutputDrain()
        self._epoll = select.epoll()

    def __iter__(self) -> Iterator[ProcessHandle]:
        return iter(self._handles.values())

    def fileno(self) -> int:
        """Readable when `wait` would return at once, deadlines aside."""
        return self._epoll.fileno()

    def start(self, first_lane: int, lanes: int) -> ProcessHandle:
        """A new process for these lanes; it imports what it needs while nobody waits for it."""
        job = {**self._job, "first_lane": first_lane, "lanes": lanes}
        handle = ProcessHandle(job, self._limits, self.memory, self._drain)
        self._handles[handle.pid] = handle
        for descriptor in (handle.channel.fileno(), handle.pidfd):
            self._by_descriptor[descriptor] = handle
            self._epoll.register(descriptor, select.EPOLLIN)
        return handle

    def wait(self, until: float) -> tuple[list[ProcessHandle], list[ProcessHandle]]:
        """Those that have something to say, and those that have ended, once there are any or `until` has come.

        Sleeps; in monotonic seconds. Returns earlier, with nothing, when there may be a deadline to enforce.
        """
        timeout = max(min([until, *(handle.check_at for handle in self)]) - time.monotonic(), 0.0)
        speaking: list[ProcessHandle] = []
        ended: list[ProcessHandle] = []
        for descriptor, _ in self._epoll.poll(timeout if timeout != math.inf else None):
            handle = self._by_descriptor[descriptor]
            (ended if descriptor == handle.pidfd else speaking).append(handle)
        return speaking, ended

    def enforce(self) -> None:
        """Kill what is late. Only to be called after `wait` and what it gave was read: an answer may have come."""
        now = time.monotonic()
        for handle in self:
            handle.enforce(now)

    def hush(self, handle: ProcessHandle) -> None:
        """Its channel is over; there is nothing to wait for but its end."""
        del self._by_descriptor[handle.channel.fileno()]
        self._epoll.unregister(handle.channel.fileno())

    def bury(self, handle: ProcessHandle) -> Ending:
        """Release what has ended."""
        for descriptor in (handle.channel.fileno(), handle.pidfd):
            if self._by_descriptor.pop(descriptor, None) is not None:
                self._epoll.unregister(descriptor)
        del self._handles[handle.pid]
        return handle.bury()

    def stop(self, timeout_s: float) -> None:
        """Have all close their envs within `timeout_s` seconds, kill the others, and release everything."""
        deadline = time.monotonic() + timeout_s
        for handle in self:
            handle.stop(deadline)
        while self._handles:
            speaking, ended = self.wait(math.inf)
            for handle in speaking:
                handle.receive()
                if handle.channel.is_over:
                    self.hush(handle)
            for handle in ended:
                if handle.state is State.KILLED:
                    lanes = f"{handle.first_lane} to {handle.first_lane + handle.lanes - 1}"
                    logger.warning("the process of envs %s did not end within %g s and was killed", lanes, timeout_s)
                self.bury(handle)
            self.enforce()
        self._drain.stop()
        self._epoll.close()
        os.close(self.memory)
