"""Measures how a learner spends its time: waiting for data, decoding, publishing, and everything else, as training."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headrace.schemas.messages.learner_messages import LEARNER_PARTS

TRAIN = "train"


class TimeSpent:
    """The seconds of one thread by part, since `start`. They add up to all of its time.

    - wait: in the stream, until something arrives: data, or the first worker.
    - decode: in `EpisodeStream.next` otherwise, mostly for reading batches.
    - publish: in `publish` and `log` of a `WeightPublisher`.
    - train: everything else. It is the user's own code, with commits and checkpoints.

    The thread is the one that reads the stream. The time of other threads counts as no part: ZeroMQ's own, which
    receive while the learner trains, and threads of the user. Where a thread of its own reads the stream and hands
    batches on, `train` is what that thread does between two batches, also while it waits to hand one on.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._thread = 0
        """Identity of the thread that is measured; 0 before `start`."""
        self._seconds = dict.fromkeys(LEARNER_PARTS, 0.0)
        self._part = TRAIN
        self._since = 0.0

    def start(self) -> None:
        """Begin to measure this thread. The time so far counts as no part."""
        self._thread, self._since = threading.get_ident(), self._clock()

    def follow(self) -> None:
        """Measure this thread from now on, in place of the one before."""
        if self._thread != threading.get_ident():
            self._switch(TRAIN)
            self._thread = threading.get_ident()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time of the block as this part, if this thread is measured.

        The time of a nested part does not count for the outer one.
        """
        if self._thread != threading.get_ident():
            yield
            return
        before = self._switch(name)
        try:
            yield
        finally:
            self._switch(before)

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each part up to now; empty before `start`."""
        if not self._thread:
            return {}
        self._switch(self._part)
        return dict(self._seconds)

    def _switch(self, name: str) -> str:
        """Begin a part, and return the one before."""
        now, before = self._clock(), self._part
        self._seconds[before] += now - self._since
        self._part, self._since = name, now
        return before


NOT_MEASURED = TimeSpent()
"""The time of a process that has no stream."""
