"""A latch that wakes the driver of env processes once, and not once for each process that replies.

    tokens   an eventfd that counts the processes which need not wake the driver; each that replies takes one
    bell     an eventfd for which the driver sleeps; a process that finds no token rings it

While the driver does not sleep there are no tokens. So no reply is missed: a process either rings the bell, or took a
token before the driver took all tokens back. After that the driver looks for replies.
"""

from __future__ import annotations

import os


class WakeupLatch:
    """The driver's side."""

    def __init__(self) -> None:
        self.tokens = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK | os.EFD_SEMAPHORE)
        self.bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._given = 0

    def arm(self, replies: int) -> None:
        """Have the bell ring after this many more replies, or earlier if some came since `disarm`."""
        if replies > 1:
            self._given += replies - 1
            os.eventfd_write(self.tokens, replies - 1)

    def disarm(self) -> None:
        """Have every reply ring from now on. Call it before looking which processes have replied."""
        _drain(self.bell, 1)
        _drain(self.tokens, self._given)
        self._given = 0

    def ring(self) -> None:
        """Ring the bell, so that the driver's next sleep ends at once."""
        os.eventfd_write(self.bell, 1)

    def close(self) -> None:
        """Close both eventfds."""
        os.close(self.tokens)
        os.close(self.bell)


def _drain(counter: int, times: int) -> None:
    try:
        for _ in range(times):
            os.eventfd_read(counter)
    except BlockingIOError:
        return


def count_down(tokens: int, bell: int) -> None:
    """Record one reply in the latch: take a token, or ring the bell if there is none."""
    try:
        os.eventfd_read(tokens)
    except BlockingIOError:
        os.eventfd_write(bell, 1)
