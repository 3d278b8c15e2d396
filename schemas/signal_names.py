"""Signals in words."""

from __future__ import annotations

import signal

_NAMES = {number.value: number.name for number in signal.Signals}


def signal_name(number: int) -> str:
    """ "SIGKILL"; most real-time signals have no name, and are called by their number."""
    return _NAMES.get(number, str(number))
