"""The flight recorder: a small memory-mapped file with a worker's running totals, readable after any death.

    0      8 x i64   magic, layout version, slot, incarnation, pid, number of commits, 0, 0
    64     128 x i64 area 0   ┐ commit n writes area n % 2 whole and then stores n, a single word, so one area is
    1088   128 x i64 area 1   ┘ complete at every instant and a SIGKILL between two stores tears nothing
    2112   1024 x 3 x i64     the window: (seq, steps, chunks) of each batch cut, at seq % 1024, written before the
                              commit that counts it and not overwritten before it is settled

The page cache outlives the process, so nothing is ever flushed. A reader on the same host sees the last commit after a
kill or a segfault. It does not after a power loss, when the books of the host's workers are gone with the host.

A live writer may be read too: the reader starts over when another commit ended while it read. An update costs about 0.3
microseconds.
"""

from __future__ import annotations

import mmap
import os
import time
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from headrace.schemas.errors import RunDirError
from headrace.schemas.ledger import Count, Discard, Drop, Settled, WorkerTotals, plus
from headrace.schemas.messages import HeldBatch

WINDOW = 1024
"""The most batches a worker may keep unsettled."""

_MAGIC = 0x4452_4F43_4552_5248
_LAYOUT = 2
_KNOWN_LAYOUTS = (1, 2)
"""Layout 1, of the previous minor version, has no env steps."""
_COMMITS = 5
_HEADER = 8
_AREA = 128
_RING = _HEADER + 2 * _AREA
_SIZE = 8 * (_RING + 3 * WINDOW)

_UPDATED_NS, _SEQ, _STEPPED, _OPEN, _SHIPPED, _SHIPPED_CHUNKS, _EPISODES, _FAILURES, _REBUILDS, _SETTLED_SEQ = range(10)
_COMMITTED, _SILENT_UNTIL_NS, _ACCEPTED, _ENV_STEPS = 10, 12, 13, 14
_DISCARDED = 16
_DROPPED = _DISCARDED + 16
_SETTLED_DROPPED = _DROPPED + 32
_DISCARDS = {reason.value: i for i, reason in enumerate(Discard)}
_DROPS = {reason.value: i for i, reason in enumerate(Drop)}


class Recorder:
    """The writing side; one process, one thread."""

    def __init__(self, path: Path, slot: int, incarnation: int) -> None:
        self.path = path
        try:
            with path.open("w+b") as file:
                os.posix_fallocate(file.fileno(), 0, _SIZE)  # with a sparse file, a full disk would mean SIGBUS
                self._map = mmap.mmap(file.fileno(), _SIZE)
        except OSError as error:
            raise RunDirError(str(path), error.strerror or str(error)) from error
        self._words = memoryview(self._map).cast("q")
        self._areas = [self._words[_HEADER + i * _AREA : _HEADER + (i + 1) * _AREA] for i in (0, 1)]
        self._values = array("q", bytes(8 * _AREA))
        self._commits = 0
        self._commit()
        for i, word in enumerate((_LAYOUT, slot, incarnation, os.getpid()), start=1):
            self._words[i] = word
        self._words[0] = _MAGIC

    def step(self, stepped: int, open_steps: int, env_steps: int, discarded: Mapping[str, int]) -> None:
        """Record progress between two batches: the hot path's update. It also ends an announced silence."""
        v = self._values
        v[_STEPPED], v[_OPEN], v[_ENV_STEPS], v[_SILENT_UNTIL_NS] = stepped, open_steps, env_steps, 0
        for reason, steps in discarded.items():
            v[_DISCARDED + _DISCARDS[reason]] = steps
        self._commit()

    def touch(self, silence_s: float = 0.0) -> None:
        """Record that the process is alive, and how long it may be silent beyond its lease from now on."""
        self._values[_SILENT_UNTIL_NS] = time.monotonic_ns() + int(silence_s * 1e9)
        self._commit()

    def totals(self, totals: WorkerTotals, batch: HeldBatch | None = None) -> None:
        """Record all totals and, with `batch`, that it was cut. Call it before the batch is sent."""
        if batch is not None:
            at = _RING + 3 * (batch.seq % WINDOW)
            self._words[at], self._words[at + 1], self._words[at + 2] = batch.seq, batch.steps, batch.chunks
        v = self._values
        v[_SEQ], v[_STEPPED], v[_OPEN] = totals.seq, totals.stepped, totals.open
        v[_SHIPPED], v[_SHIPPED_CHUNKS] = totals.shipped, totals.shipped_chunks
        v[_ENV_STEPS] = totals.steps_of_envs
        v[_EPISODES], v[_FAILURES], v[_REBUILDS] = totals.episodes, totals.env_failures, totals.env_rebuilds
        for reason, steps in totals.discarded.items():
            v[_DISCARDED + _DISCARDS[reason]] = steps
        self._counts(_DROPPED, totals.dropped)
        self._commit()

    def settled(self, settled: Settled, accepted: int) -> None:
        """Record what the broker last said became of this incarnation's batches."""
        v = self._values
        v[_SETTLED_SEQ], v[_ACCEPTED] = settled.seq, accepted
        v[_COMMITTED], v[_COMMITTED + 1] = settled.committed
        self._counts(_SETTLED_DROPPED, settled.dropped)
        self._commit()

    def close(self) -> None:
        """Release the mapping; the file stays for its readers."""
        for view in (*self._areas, self._words):
            view.release()
        self._map.close()

    def _counts(self, base: int, counts: Mapping[str, Count]) -> None:
        other = (0, 0)
        for reason, count in counts.items():
            if reason not in _DROPS or reason == Drop.OTHER:
                other = plus(other, count)
            else:
                at = base + 2 * _DROPS[reason]
                self._values[at], self._values[at + 1] = count
        at = base + 2 * _DROPS[Drop.OTHER]
        self._values[at], self._values[at + 1] = other

    def _commit(self) -> None:
        self._values[_UPDATED_NS] = time.monotonic_ns()
        self._commits += 1
        self._areas[self._commits & 1][:] = self._values
        self._words[_COMMITS] = self._commits


@dataclass(frozen=True, slots=True)
class Reading:
    """The content of a recorder file. `updated_ns` and `silent_until_ns` are on the host's monotonic clock."""

    slot: int
    incarnation: int
    pid: int
    updated_ns: int
    silent_until_ns: int
    accepted: int
    totals: WorkerTotals
    settled: Settled
    window: list[HeldBatch]
    """Batches after `settled.seq`, in order."""


def read_recorder(path: Path) -> Reading | None:
    """Read the last commit in the file at `path`.

    None when there is no file, when its writer died before the first commit, and for a file that is not a recorder of a
    known layout. Raises nothing but OSError for a file it may not read.
    """
    words = _snapshot(path)
    if words is None or words[0] != _MAGIC or words[1] not in _KNOWN_LAYOUTS:
        return None
    try:
        return _reading(words)
    except ValidationError:
        return None


def _snapshot(path: Path) -> memoryview | None:
    """Copy the file's words as of one commit.

    A writer that never pauses is read as it is, after a hundred attempts.
    """
    try:
        with path.open("rb", buffering=0) as file:
            for _ in range(100):
                words = os.pread(file.fileno(), _SIZE, 0)
                if len(words) != _SIZE:
                    return None
                if os.pread(file.fileno(), 8, 8 * _COMMITS) == words[8 * _COMMITS : 8 * _COMMITS + 8]:
                    break
            return memoryview(words).cast("q")
    except FileNotFoundError:
        return None


def _reading(words: memoryview) -> Reading:
    start = _HEADER + (words[_COMMITS] & 1) * _AREA
    v = words[start : start + _AREA]
    totals = WorkerTotals(
        seq=v[_SEQ],
        stepped=v[_STEPPED],
        open=v[_OPEN],
        shipped=v[_SHIPPED],
        shipped_chunks=v[_SHIPPED_CHUNKS],
        discarded={reason: v[_DISCARDED + i] for reason, i in _DISCARDS.items() if v[_DISCARDED + i]},
        dropped=_read_counts(v, _DROPPED),
        episodes=v[_EPISODES],
        env_failures=v[_FAILURES],
        env_rebuilds=v[_REBUILDS],
        env_steps=v[_ENV_STEPS] if words[1] > 1 else None,
    )
    settled = Settled(
        seq=v[_SETTLED_SEQ],
        committed=(v[_COMMITTED], v[_COMMITTED + 1]),
        dropped=_read_counts(v, _SETTLED_DROPPED),
    )
    first = max(settled.seq, totals.seq - WINDOW) + 1
    window = [_read_batch(words, seq) for seq in range(first, totals.seq + 1)]
    return Reading(
        slot=words[2],
        incarnation=words[3],
        pid=words[4],
        updated_ns=v[_UPDATED_NS],
        silent_until_ns=v[_SILENT_UNTIL_NS],
        accepted=v[_ACCEPTED],
        totals=totals,
        settled=settled,
        window=[batch for batch in window if batch is not None],
    )


def _read_counts(values: memoryview, base: int) -> dict[str, Count]:
    counts = {reason: (values[base + 2 * i], values[base + 2 * i + 1]) for reason, i in _DROPS.items()}
    return {reason: count for reason, count in counts.items() if count != (0, 0)}


def _read_batch(words: memoryview, seq: int) -> HeldBatch | None:
    at = _RING + 3 * (seq % WINDOW)
    if words[at] != seq:
        return None
    return HeldBatch(seq=seq, steps=words[at + 1], chunks=words[at + 2])
