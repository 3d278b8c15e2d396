"""The outcome of a repeated episode, and a word on a call that does not return."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from headrace.schemas.chunks.chunk import ChunkEnd

log = logging.getLogger("headrace.deploy")

SAY_INTERVAL_S = 10.0
"""Seconds between two words on a call that does not return."""


@dataclass(slots=True)
class Repeated:
    """How far the repetition came, how it ended, and where it first differed."""

    at: str = "construction"
    """The last call: "construction", "reset", or "step N", from 1 on."""
    error: BaseException | None = None
    end: ChunkEnd = ChunkEnd.ONGOING
    """How the episode ended, where it did not fail."""
    difference: str = ""
    """The first difference from what the worker saw, in words; "" for none."""
    differs_at: str = ""

    def note(self, what: str) -> None:
        """Note a difference, if it is the first one."""
        if not self.difference:
            self.difference, self.differs_at = what, self.at


@contextmanager
def slow_calls_said(repeated: Repeated) -> Iterator[threading.Event]:
    """Log every 10 s in this block which call has not returned, until the event is set."""
    over = threading.Event()
    thread = threading.Thread(target=_say_slow_calls, args=(repeated, over), name="slow-calls", daemon=True)
    thread.start()
    try:
        yield over
    finally:
        over.set()
        thread.join()


def _say_slow_calls(repeated: Repeated, over: threading.Event) -> None:
    at, since = repeated.at, time.monotonic()
    said_at = since
    while not over.wait(SAY_INTERVAL_S / 10):
        now = time.monotonic()
        if repeated.at != at:
            at, since, said_at = repeated.at, now, now
        elif now - said_at >= SAY_INTERVAL_S:
            said_at = now
            log.warning("%s has not returned for %.0f s; Ctrl-C interrupts it", at, now - since)
