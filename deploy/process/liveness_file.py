"""The liveness file of a process without a recorder. Its loop touches the file; its supervisor names the path.

A service manager is a supervisor too, which hears of each touch by its socket.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from headrace.deploy.process.child_environment import LIVENESS_FILE
from headrace.deploy.process.service_manager import service_manager

FIRST_SIGN_S = 60.0
"""Seconds that a new process has before its first sign of life: torch and the user's env take time to import."""

_EVERY_S = 0.5


class LivenessFile:
    """Touches the file at `place`; None: no supervisor watches."""

    def __init__(self, place: Path | None) -> None:
        self._place = place
        self._next = 0.0

    @classmethod
    def from_environment(cls) -> LivenessFile:
        """Return the file that our supervisor watches, if any.

        Takes the variable out of the environment: processes that we start must not touch our file.
        """
        place = os.environ.pop(LIVENESS_FILE, "")
        return cls(Path(place) if place else None)

    @property
    def is_watched(self) -> bool:
        """Return whether a supervisor started this process and watches it."""
        return self._place is not None

    def touch(self) -> None:
        """Touch the file, at most twice a second; cheap enough for every turn of a loop."""
        service_manager().turn()
        now = time.monotonic()
        if self._place is None or now < self._next:
            return
        self._next = now + _EVERY_S
        # the run directory was removed, so its supervisor can judge no process any more
        with contextlib.suppress(OSError):
            self._place.touch()
            # A monotonic time, since a user may set the time of day. A full disk still takes a file's time.
            os.utime(self._place, ns=(time.monotonic_ns(),) * 2)


def seconds_silent(place: Path) -> float | None:
    """Return the seconds since the file was last touched; None where it never was."""
    try:
        return (time.monotonic_ns() - place.stat().st_mtime_ns) / 1e9
    except OSError:
        return None
