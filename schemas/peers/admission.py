"""The admission of new peers at one port: how many at a time, and fewer soon after an attack.

On TCP libzmq asks the server before it admits a connection (ZAP). Until then a peer waits in its handshake.
"""

from __future__ import annotations

import time
from collections.abc import Callable

WARY_S, ADMITTED_AT_ONCE, ADMISSION_S = 10.0, 4, 0.02
"""For so many seconds after a stranger that sends zeros, or a known peer that floods, a port admits so many peers at a
time. The next ones wait for so many seconds, and until the port has received all that waits.
"""
MOST_ADMITTED = 256
"""Peers that a port admits at a time else."""


class Admission:
    """The admission at one port. For the thread that receives from it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_behind = False
        """True while messages wait at the socket although many were taken."""
        self._clock = clock
        self._wary_until = self._next_at = 0.0

    def be_wary(self) -> None:
        """Admit few peers for a while: another one like that may be among them."""
        self._wary_until = self._clock() + WARY_S

    def places(self, *, waits: bool) -> int:
        """Return how many peers the port may admit now. `waits`: a message waited before this turn.

        Soon after a stranger sent zeros, or a known peer too much, they are few. That bounds what the next such peers
        leave at the socket.
        """
        now = self._clock()
        if now >= self._wary_until:
            return MOST_ADMITTED
        if (waits and self.is_behind) or now < self._next_at:
            return 0
        self._next_at = now + ADMISSION_S
        return ADMITTED_AT_ONCE
