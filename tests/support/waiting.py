"""One way to wait in tests: for an event, with a deadline."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
PATIENCE = float(os.environ.get("PATIENCE", "1"))
"""Every wait of the tests lasts this many times as long. Set it where the machine is slower than ours by far."""
TIMEOUT_S = 200.0 * PATIENCE
"""Long, since a busy machine may be slow; a wait that goes well takes as long as what it waits for."""
_PAUSE_S = 0.01


def wait_until(
    condition: Callable[[], T], what: str = "the condition", timeout_s: float = TIMEOUT_S, pause_s: float = _PAUSE_S
) -> T:
    """Return the first true answer of `condition`; AssertionError with `what` after `timeout_s`.

    `pause_s` passes between two questions. Make it longer where an answer takes CPU time: others may need it.
    """
    pause, deadline = threading.Event(), time.monotonic() + timeout_s
    while not (answer := condition()):
        if time.monotonic() >= deadline:
            raise AssertionError(f"{what} did not come true within {timeout_s:g} s")
        pause.wait(pause_s)
    return answer
