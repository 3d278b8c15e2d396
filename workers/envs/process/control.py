"""What a process of envs is told to do, what came of it, and the notes it keeps meanwhile: all in shared memory.

Orders are obeyed one after the other. Each stands in a slot, a command for every lane, and so does its answer; the
driver may write the next order while the process is busy with one, so that it need not wait to hear of it.

    slot 0   commands ▮▮▮▮  seeds ▮▮▮▮  outcomes ▮▮▮▮  words "..."     order 0, SLOTS, 2 * SLOTS, ...
    slot 1   commands ▮▮▮▮  seeds ▮▮▮▮  outcomes ▮▮▮▮  words "..."     order 1, ...

The notes are there to be read at any time, most of all when the process answers no more: they say which env it was that
did not return.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from headrace.workers.envs.process.shared_arrays import Layout, map_arrays

NO_SEED = -1
SLOTS = 8
"""Orders of a process that can be under way at once."""
ENDS, BEGAN = 0x0F, 0x10
"""In an outcome: bits of the `ChunkEnd` of a step that ended the episode; that the env was reset."""

_WORDS = 4096
"""Bytes of JSON that stand in a slot; more goes by the socket."""


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
    """What the process is doing. All but IDLE and START are calls into a user's code, which may not return."""

    IDLE = 0
    CONSTRUCTION = 1
    RESET = 2
    STEP = 3
    CLOSE = 4
    RENDER = 5
    START = 6
    """Of the process itself, before it obeys."""


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """One order and its answer, by lane of the process, from 0."""

    commands: NDArray[np.uint8]
    seeds: NDArray[np.int64]
    outcomes: NDArray[np.uint8]
    words: NDArray[np.uint8]
    """What else there is to tell, as JSON, if it fits in here."""
    counts: memoryview[int]
    """How many outcomes are not zero, and the bytes of what is told; more than `words` holds came by the socket."""


class Control:
    """Orders and answers by slot, and the notes."""

    def __init__(self, descriptor: int, lanes: int, *, create: bool) -> None:
        layout: Layout = {
            "commands": (np.dtype(np.uint8), (SLOTS, lanes)),
            "seeds": (np.dtype(np.int64), (SLOTS, lanes)),
            "outcomes": (np.dtype(np.uint8), (SLOTS, lanes)),
            "words": (np.dtype(np.uint8), (SLOTS, _WORDS)),
            "counts": (np.dtype(np.int64), (SLOTS, 2)),
            "indices": (np.dtype(np.int64), (lanes,)),
            "notes": (np.dtype(np.int64), (4,)),
        }
        arrays = map_arrays(descriptor, layout, create=create)
        commands, seeds, outcomes, words = (arrays[name] for name in ("commands", "seeds", "outcomes", "words"))
        self.slots = [
            # A memoryview's items are read and written faster than an array's.
            Slot(commands[i], seeds[i], outcomes[i], words[i], memoryview(arrays["counts"][i]))
            for i in range(SLOTS)
        ]
        self.indices = arrays["indices"]
        """What the creator of each lane's env is told as `vector_index`."""
        self._notes: memoryview[int] = memoryview(arrays["notes"])  # type: ignore[arg-type]
        self._is_copied = False

    def end_copies(self) -> None:
        """Have a copy of this process, which an env has forked, end as soon as its call returns: it has no driver."""
        os.register_at_fork(after_in_child=self._note_copy)

    def _note_copy(self) -> None:
        self._is_copied = True

    def begin(self, lane: int, phase: Phase) -> None:
        """A call begins now that may not return; `lane` -1 is none in particular."""
        notes = self._notes
        notes[0], notes[2] = lane, time.monotonic_ns()
        notes[1] = phase

    def end(self) -> None:
        """It has returned."""
        if self._is_copied:
            os._exit(0)
        self._notes[1] = Phase.IDLE

    def rest(self) -> None:
        """No call is under way from now on."""
        self.begin(-1, Phase.IDLE)

    @contextmanager
    def during(self, lane: int, phase: Phase) -> Iterator[None]:
        """`begin` and `end`; what the process does next has its time from then on, however long this took."""
        self.begin(lane, phase)
        try:
            yield
        finally:
            self.end()
            self.rest()

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
