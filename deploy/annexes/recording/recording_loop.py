"""The loop of `headrace record`: batches of a stream into files, then the commit of what is on the disk."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter

from headrace.deploy.annexes.recording.compaction import compact, remove_oldest
from headrace.deploy.annexes.recording.recording_folder import RecordingFolder
from headrace.learner_stub import EpisodeStream
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.errors import RunDirError
from headrace.schemas.errors.fleet import NO_ROOM

FLUSH_BYTES = 64 << 20
FLUSH_AGE_S = 30.0
FLUSH_BATCHES = 256
"""Batches of one worker, which keeps them until they are committed. It keeps about 1,000 at most."""

TEND_S = 10.0
"""Seconds between two looks for files to merge."""
RETRY_S = 2.0
SAY_S = 10.0
_TURN_S = 0.2

log = logging.getLogger("headrace.deploy")


class Recording:
    """A recording in progress. Batches wait in memory, uncommitted, until they fill a file.

    A file is also written once its first batch is `FLUSH_AGE_S` old, when no worker is left or all wait for a commit,
    and at the end. A thread merges small files; at the end the loop merges those that are left. `steps`, `writes` and
    `nbytes` count what this process has written.
    """

    def __init__(
        self,
        stream: EpisodeStream,
        folder: RecordingFolder,
        *,
        max_bytes: float = math.inf,
        max_age_s: float = math.inf,
    ) -> None:
        self.steps = self.writes = self.nbytes = 0
        self._stream = stream
        self._folder = folder
        self._bounds = max_bytes, max_age_s
        self._say_at = time.monotonic() + SAY_S
        self._tend_at = 0.0
        self._tending = threading.Thread()
        self._empty()

    def _empty(self) -> None:
        self._batches: list[ChunkBatch] = []
        self._by_worker: Counter[tuple[int, int]] = Counter()
        self._waiting_bytes = 0
        self._due_at = math.inf

    def run(self, stopping: threading.Event) -> None:
        """Record until the fleet ends or `stopping` is set. Wait while the disk is full.

        Raises `RunDirError` where the folder cannot be written to, or is full at the end, and what the stream raises.
        """
        try:
            while not stopping.is_set() and not self._stream.ended:
                batch = self._stream.next(_TURN_S)
                if batch is not None:
                    self._take(batch)
                if self._is_due(idle=batch is None):
                    self._flush(stopping)
                self._tend_in_background()
                self._say_progress()
            self._flush(stopping)
        finally:
            if self._tending.ident is not None:
                self._tending.join()
        self._tend(all_now=True)

    def _tend_in_background(self) -> None:
        if time.monotonic() >= self._tend_at and not self._tending.is_alive():
            self._tend_at = time.monotonic() + TEND_S
            self._tending = threading.Thread(target=self._tend, name="compaction")
            self._tending.start()

    def _tend(self, *, all_now: bool = False) -> None:
        """Merge the numbers that are due, and remove those beyond the bounds.

        What keeps it from that is logged: the numbers are complete as they are.
        """
        try:
            compact(self._folder.path, all_now=all_now)
            remove_oldest(self._folder.path, *self._bounds)
        except (OSError, ValueError, RunDirError) as error:  # pyarrow's errors are of the first two kinds
            reason = getattr(error, "strerror", None) or error
            log.warning("recording %s: its small files are not merged yet (%s)", self._folder.path, reason)

    def _take(self, batch: ChunkBatch) -> None:
        if not self._batches:
            self._due_at = time.monotonic() + FLUSH_AGE_S
        self._batches.append(batch)
        self._by_worker[batch.slot, batch.incarnation] += 1
        self._waiting_bytes += batch.nbytes

    def _is_due(self, *, idle: bool) -> bool:
        if idle and (self._stream.starved or not self._stream.workers):
            return True
        is_full = self._waiting_bytes >= FLUSH_BYTES or max(self._by_worker.values(), default=0) >= FLUSH_BATCHES
        return is_full or time.monotonic() >= self._due_at

    def _flush(self, stopping: threading.Event) -> None:
        """Write the batches that wait, then commit them: until then they come again, after any end of this process."""
        if self._batches:
            self.nbytes += self._written(stopping)
            self.steps += sum(batch.steps for batch in self._batches)
            self.writes += 1
        self._stream.commit()
        self._empty()

    def _written(self, stopping: threading.Event) -> int:
        """Write the files, again and again while the disk is full. Return their size."""
        position, say_at = self._stream.position(), 0.0
        while True:
            try:
                return self._folder.write(self._batches, position)
            except OSError as error:
                problem = self._problem(error)
                if error.errno not in NO_ROOM or stopping.is_set() or self._stream.ended:
                    raise problem from error
            retry_at = time.monotonic() + RETRY_S
            if retry_at >= say_at:
                log.error("%s", problem)
                say_at = retry_at + SAY_S
            while time.monotonic() < retry_at and not stopping.is_set():
                self._stream.pump(_TURN_S)
                self._tend_in_background()  # it may make room

    def _problem(self, error: OSError) -> RunDirError:
        if error.errno in NO_ROOM:
            steps = sum(batch.steps for batch in self._batches)
            reason = f"the disk is full; free some space. {steps:,} steps wait for it, uncommitted, and are not lost"
        else:
            reason = f"it cannot be written to ({error.strerror or error}); repair that, and record again"
        return RunDirError(str(self._folder.path), reason, sentence=f"recording {self._folder.path}: {reason}")

    def _say_progress(self) -> None:
        if time.monotonic() >= self._say_at:
            self._say_at = time.monotonic() + SAY_S
            log.info("%s; %s batches wait for the next file", self.in_words(), f"{len(self._batches):,}")

    def in_words(self) -> str:
        """Return what this process has recorded."""
        return f"{self._folder.path}: {self.steps:,} steps in {self.writes:,} writes, {self.nbytes / 1e6:,.1f} MB"
