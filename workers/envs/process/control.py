"""Orders to a process of envs, its replies, and its notes of what it is doing, all in shared memory.

The process obeys one order after the other. An order has a command for every lane. Each slot holds an order and its
reply. The driver may write the next order while the process is busy, so the process need not wait for it.

    slot 0   commands ▮▮▮▮  seeds ▮▮▮▮  outcomes ▮▮▮▮  words "..."     order 0, SLOTS, 2 * SLOTS, ...
    slot 1   commands ▮▮▮▮  seeds ▮▮▮▮  outcomes ▮▮▮▮  words "..."     order 1, ...

The driver may read the notes at any time. When the process stops replying, they name the env that did not return.
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

from headrace.schemas.chunks.task import MOST_TASK_BYTES
from headrace.workers.envs.process.shared_arrays import Layout, map_arrays

NO_SEED, WITHOUT_SEED = -1, -2
"""Seeds in an order. NO_SEED: no reset after the step, or no seed for a creator. WITHOUT_SEED: an unseeded reset."""
SLOTS = 8
"""Number of orders of a process that can be under way at once."""
ENDS, BEGAN, ALSO_TRUNCATED = 0x0F, 0x10, 0x20
"""Bits of an outcome: the `ChunkEnd` of a step that ended the episode, the flag of a reset, and that of a step that was
terminated and truncated at once.
"""

_WORDS = 4096
"""Bytes of JSON that fit in a slot; longer ones go into a file."""
_TASK_EXTRA = 64
"""Bytes of JSON around a lane's task, at most."""


def order_seed(seed: int | None) -> int:
    """Return the number that stands for `seed` in a reset order."""
    return WITHOUT_SEED if seed is None else seed


def reset_seed(ordered: int) -> int | None:
    """Return the seed of a reset that was ordered: the inverse of `order_seed`."""
    return None if ordered == WITHOUT_SEED else ordered


class Command(IntEnum):
    """The next order for a lane."""

    NONE = 0
    BUILD = 1
    """The seed is for the env's creator."""
    REBUILD = 2
    """Build an env, as for BUILD, in place of a failed one."""
    RESET = 3
    """With the seed, or without one."""
    STEP = 4
    """Step with the lane's action. If that ends the episode, reset the env too, as for RESET, unless NO_SEED."""
    CLOSE = 5
    """The lane has moved to another process, or failed."""
    RENDER = 6


class Phase(IntEnum):
    """The current phase of the process. All but IDLE and START are calls into a user's code, which may not return."""

    IDLE = 0
    CONSTRUCTION = 1
    RESET = 2
    STEP = 3
    CLOSE = 4
    RENDER = 5
    START = 6
    """The process starts, and does not obey orders yet."""


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """One order and its reply, by lane of the process, from 0."""

    index: int
    commands: NDArray[np.uint8]
    seeds: NDArray[np.int64]
    outcomes: NDArray[np.uint8]
    words: NDArray[np.uint8]
    """Further results of the process, as JSON, if they fit."""
    tasks: NDArray[np.uint8]
    """Changed tasks as JSON: [lane, values for its resets from this order on]."""
    counts: memoryview[int]
    """Number of outcomes that are not zero, and number of bytes told. Bytes that do not fit `words` are in a file.
    The third is the number of bytes of `tasks`.
    """


class Control:
    """Orders and replies by slot, and the notes."""

    def __init__(self, descriptor: int, lanes: int, *, create: bool) -> None:
        layout: Layout = {
            "commands": (np.dtype(np.uint8), (SLOTS, lanes)),
            "seeds": (np.dtype(np.int64), (SLOTS, lanes)),
            "outcomes": (np.dtype(np.uint8), (SLOTS, lanes)),
            "words": (np.dtype(np.uint8), (SLOTS, _WORDS)),
            # Pages that were never written take no memory.
            "tasks": (np.dtype(np.uint8), (SLOTS, lanes * (MOST_TASK_BYTES + _TASK_EXTRA) + _TASK_EXTRA)),
            "counts": (np.dtype(np.int64), (SLOTS, 3)),
            "indices": (np.dtype(np.int64), (lanes,)),
            "notes": (np.dtype(np.int64), (4,)),
        }
        arrays = map_arrays(descriptor, layout, create=create)
        names = ("commands", "seeds", "outcomes", "words", "tasks")
        commands, seeds, outcomes, words, tasks = (arrays[name] for name in names)
        self.slots = [
            # A memoryview's items are read and written faster than an array's.
            Slot(i, commands[i], seeds[i], outcomes[i], words[i], tasks[i], memoryview(arrays["counts"][i]))
            for i in range(SLOTS)
        ]
        self.indices = arrays["indices"]
        """`vector_index` for the creator of each lane's env."""
        self._notes: memoryview[int] = memoryview(arrays["notes"])  # type: ignore[arg-type]
        self._is_copied = False

    def end_copies(self) -> None:
        """End a copy of this process that an env has forked when the env's call returns, because it has no driver."""
        os.register_at_fork(after_in_child=self._note_copy)

    def _note_copy(self) -> None:
        self._is_copied = True

    def begin(self, lane: int, phase: Phase) -> None:
        """Note the start of a call that may not return; `lane` -1 means no particular lane."""
        notes = self._notes
        notes[0], notes[2] = lane, time.monotonic_ns()
        notes[1] = phase

    def end(self) -> None:
        """Note that the call has returned."""
        if self._is_copied:
            os._exit(0)
        self._notes[1] = Phase.IDLE

    def rest(self) -> None:
        """Note that no call is under way."""
        self.begin(-1, Phase.IDLE)

    @contextmanager
    def during(self, lane: int, phase: Phase) -> Iterator[None]:
        """Note a call, from its begin to its end. The deadline of the next call counts from that end."""
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
        """Resident memory of the process, not older than its last reply but one."""
        return self._notes[3]

    @rss_bytes.setter
    def rss_bytes(self, size: int) -> None:
        self._notes[3] = size
