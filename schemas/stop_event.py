"""Stop signals as an event that a loop can check between two pieces of work."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stop_event() -> Iterator[threading.Event]:
    """Give an event that the first SIGTERM or Ctrl-C sets. A second signal acts as it did before this block."""
    stopping = threading.Event()
    numbers = (signal.SIGTERM, signal.SIGINT)

    def on_signal(number: int, frame: object) -> None:
        stopping.set()
        restore()

    before = {number: signal.signal(number, on_signal) for number in numbers}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    try:
        yield stopping
    finally:
        restore()
