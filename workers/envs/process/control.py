"""What a process of envs is told to do, and the notes it keeps of what it does: both in shared memory.

The parent writes commands and rings; it writes no more until the process has answered. The notes are there to be read
at any time, most of all when the process answers no more: they say which env it was that did not return.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

import numpy as np

from headrace.workers.envs.process.shared import Layout, map_arrays

NO_SEED = -1


class Command(IntEnum):
    """What a lane is to do next."""

    NONE = 0
    BUILD = 1
    """With its seed, which the env's creator is told."""
    REBUILD = 2
    """Likewise, in place of an env that failed."""
    RESET = 3
    """With its seed."""
    STEP = 4
    """With its action. If that ends the episode and there is a seed, the env is reset at once."""
    CLOSE = 5
    """The lane lives on in another process."""
    RENDER = 6


class Phase(IntEnum):
    """What the process is doing. All but IDLE are calls into a user's code, which may not return."""

    IDLE = 0
    CONSTRUCTION = 1
    RESET = 2
    STEP = 3
    CLOSE = 4
    RENDER = 5


class Control:
    """Commands and seeds by lane of this process, from 0; and the notes."""

    def __init__(self, descriptor: int, lanes: int, *, create: bool) -> None:
        layout: Layout = {
            "commands": (np.dtype(np.uint8), (lanes,)),
            "seeds": (np.dtype(np.int64), (lanes,)),
            "indices": (np.dtype(np.int64), (lanes,)),
            "notes": (np.dtype(np.int64), (4,)),
        }
        arrays = map_arrays(descriptor, layout, create=create)
        self.commands, self.seeds = arrays["commands"], arrays["seeds"]
        self.indices = arrays["indices"]
        """What the creator of each lane's env is told as `vector_index`."""
        # A memoryview's items are read and written faster than an array's.
        self._notes: memoryview[int] = memoryview(arrays["notes"])  # type: ignore[arg-type]

    def begin(self, lane: int, phase: Phase) -> None:
        """A call begins now that may not return; `lane` -1 is none in particular."""
        notes = self._notes
        notes[0], notes[2] = lane, time.monotonic_ns()
        notes[1] = phase

    def end(self) -> None:
        """It has returned."""
        self._notes[1] = Phase.IDLE

    @contextmanager
    def during(self, lane: int, phase: Phase) -> Iterator[None]:
        """`begin` and `end`."""
        self.begin(lane, phase)
        try:
            yield
        finally:
            self.end()

    @property
    def doing(self) -> tuple[int, Phase, float]:
        """(lane, phase, monotonic time in seconds at which it began)."""
        lane, phase, since = self._notes[0], self._notes[1], self._notes[2]
        return lane, Phase(phase), since / 1e9

    @property
    def rss_bytes(self) -> int:
        """Resident memory of the process, not older than its last answer but one."""
        return self._notes[3]

    @rss_bytes.setter
    def rss_bytes(self, size: int) -> None:
        self._notes[3] = size
