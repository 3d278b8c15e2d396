"""Names of signals."""

from __future__ import annotations

import signal

_NAMES = {number.value: number.name for number in signal.Signals}


def signal_name(number: int) -> str:
    """Return "SIGKILL" and the like; most real-time signals have no name, so their number stands for it."""
    return _NAMES.get(number, str(number))
