"""How many processes are to answer before their driver is woken: it sleeps once, and not once for each of them.

    tokens   an eventfd that counts those who may keep quiet; whoever has answered takes one
    bell     an eventfd that is rung by whoever finds none, and for which the driver sleeps

While the driver does not sleep there are no tokens, so that nobody's answer goes unheard: either it rings, or it was
counted on by a driver that has looked after it took the tokens back.
"""

from __future__ import annotations

import os


class Quorum:
    """The driver's side."""

    def __init__(self) -> None:
        self.tokens = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK | os.EFD_SEMAPHORE)
        self.bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._given = 0

    def call(self, answers: int) -> None:
        """Have the bell rung when so many more have come; earlier, if some came since `dismiss`."""
        if answers > 1:
            self._given += answers - 1
            os.eventfd_write(self.tokens, answers - 1)

    def dismiss(self) -> None:
        """From now on every answer rings. To be called before one looks who has answered."""
        _drain(self.bell, 1)
        _drain(self.tokens, self._given)
        self._given = 0

    def ring(self) -> None:
        """As if somebody had answered: who sleeps next is to look at once."""
        os.eventfd_write(self.bell, 1)

    def close(self) -> None:
        os.close(self.tokens)
        os.close(self.bell)


def _drain(counter: int, times: int) -> None:
    try:
        for _ in range(times):
            os.eventfd_read(counter)
    except BlockingIOError:
        return


def answered(tokens: int, bell: int) -> None:
    """A process has answered."""
    try:
        os.eventfd_read(tokens)
    except BlockingIOError:
        os.eventfd_write(bell, 1)
