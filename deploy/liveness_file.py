"""Signs of life of a process that has no recorder: its loop turns. Its supervisor says where to give them."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

VARIABLE = "HEADRACE_LIVENESS_FILE"
"""Environment variable with the path of the file whose time is the last sign."""

_EVERY_S = 0.5


class LivenessFile:
    """Gives signs at `place`; None: nobody looks."""

    def __init__(self, place: Path | None) -> None:
        self._place = place
        self._next = 0.0

    @classmethod
    def from_environment(cls) -> LivenessFile:
        """As our supervisor wants it. Asked once: what we start is not to answer for us."""
        place = os.environ.pop(VARIABLE, "")
        return cls(Path(place) if place else None)

    def touch(self) -> None:
        """Cheap enough for every turn of a loop."""
        now = time.monotonic()
        if self._place is None or now < self._next:
            return
        self._next = now + _EVERY_S
        with contextlib.suppress(OSError):  # the run directory was removed: its supervisor can judge nobody any more
            self._place.touch()
            # Not the time of day, which may be set; and a time can be written where a disk is full.
            os.utime(self._place, ns=(time.monotonic_ns(),) * 2)


def seconds_silent(place: Path) -> float | None:
    """Seconds since the last sign; None where none was given yet."""
    try:
        return (time.monotonic_ns() - place.stat().st_mtime_ns) / 1e9
    except OSError:
        return None
