"""How much this thread does while it waits, counted in calls: a busy machine adds none, and takes none away."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

IDLE = 15_000.0
"""Calls a second that one who waits stays far below; who asks again and again makes a hundred times as many."""


def calls_a_second(wait: Callable[[], Any]) -> float:
    """Calls of functions, Python's and C's, that `wait` makes in this thread, for each second that it takes."""
    calls = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    began, before = time.monotonic(), sys.getprofile()
    sys.setprofile(note)
    try:
        wait()
    finally:
        sys.setprofile(before)
    return calls / (time.monotonic() - began)
