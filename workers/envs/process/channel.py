"""Bells and a socket between a driver and one process of envs.

    to the process     `bell`, an eventfd: each order that was written adds RING, STOP asks for the end
    from the process   `told`, an eventfd: each order that was obeyed adds one, in their order; then the latch's
                       a socket, for answers in JSON that are too long for their place in shared memory:
                       length of what follows: uint32, little-endian; then that, all of it before `told` is rung

All that is large is in shared memory, and what was written there before a bell is seen by whoever has heard it.

Bells are no sockets, since a socket's wake-up tells the scheduler that the sender is about to sleep: it then puts the
process that wakes onto the driver's core, though the driver has others to wake and another core is idle.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time

from headrace.workers.envs.process.wakeup_latch import count_down

RING, STOP = 1, 1 << 32

_LENGTH = struct.Struct("<I")
_READ = 1 << 16
_MOMENT_NS, _TURN_NS, _NAP = 300_000, 1_000_000, 1000


class DriverEnd:
    """The driver's end. Never blocks."""

    def __init__(self, sock: socket.socket, bell: int, told: int) -> None:
        sock.setblocking(False)
        self._sock, self._bell, self.told = sock, bell, told
        self._buffer = bytearray()
        self.is_over = False
        """The process has ended, or closed its end, and everything was read."""

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, signal: int) -> None:
        """RING or STOP. A process that has ended is no error: its end is noticed by its pidfd."""
        os.eventfd_write(self._bell, signal)

    def answers(self) -> int:
        """How many more orders were obeyed."""
        try:
            return os.eventfd_read(self.told)
        except BlockingIOError:
            return 0

    def listen(self) -> None:
        """Read what the socket holds, so that the process can send the rest."""
        try:
            while not self.is_over:
                part = self._sock.recv(_READ)
                self.is_over = not part
                self._buffer += part
        except BlockingIOError:
            pass
        except ConnectionResetError:
            self.is_over = True

    def message(self) -> bytes:
        """The next one that came by the socket; only for an order that was obeyed, for then it is there."""
        self.listen()
        (size,) = _LENGTH.unpack_from(self._buffer)
        body = bytes(self._buffer[_LENGTH.size : _LENGTH.size + size])
        del self._buffer[: _LENGTH.size + size]
        return body

    def close(self) -> None:
        self._sock.close()
        os.close(self._bell)
        os.close(self.told)


class ProcessEnd:
    """The end of the process of envs. Blocks."""

    def __init__(self, sock: socket.socket, bell: int, told: int, latch: tuple[int, int]) -> None:
        self._sock, self._bell, self._told, self._latch = sock, bell, told, latch
        self._sleep = select.poll()
        self._sleep.register(bell, select.POLLIN)
        self._is_brisk, self._to_sleep = False, 0
        os.set_blocking(bell, False)

    def wait(self) -> int:
        """How many more orders there are; 0 is the end that was asked for. A driver that is gone ends it otherwise.

        To be woken takes longer than a cheap env's step. So where the last order came within `_MOMENT_NS`, the next is
        looked out for as long; else one sleeps at once. Whoever has something to do meanwhile gets the core, and where
        somebody had, the next `_NAP` orders are slept for: sleepers are woken before those who wait in turn.
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

    def send(self, body: bytes) -> None:
        """What is to be told with the next answer."""
        self._sock.sendall(_LENGTH.pack(len(body)) + body)

    def answer(self) -> None:
        """Say that one more order was obeyed."""
        os.eventfd_write(self._told, 1)
        count_down(*self._latch)
