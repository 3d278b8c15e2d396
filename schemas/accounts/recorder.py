"""The flight recorder: a small memory-mapped file with a worker's running totals, readable after any death.

    0      8 x i64   magic, layout version, slot, incarnation, pid, number of commits, 0, 0
    64     128 x i64 area 0   ┐ commit n writes area n % 2 whole and then stores n, a single word, so one area is
    1088   128 x i64 area 1   ┘ complete at every instant and a SIGKILL between two stores tears nothing
    2112   1024 x 3 x i64     the window: (seq, steps, chunks) of each batch cut, at seq % 1024, written before the
                              commit that counts it and not overwritten before it is settled
    26688  16 x i64           the call of the user's code in progress; each word is whole by itself

Words of an area: a counter at the `word` of its row in `COUNTERS`; signs of life at 0, 12 and 15 (`recorder_file.py`);
what is settled at 9, 10 and 11, accepted at 13; steps by reason from 16 to 95. Later counters follow from 96 on.

The page cache outlives the process, so nothing is ever flushed. A reader on the same host sees the last commit after a
kill or a segfault. After a power loss it does not: the books of the host's workers are lost.

A live writer may be read too: the reader starts over when another commit ended while it read. An update costs about 0.3
microseconds.
"""

from __future__ import annotations

import mmap
import os
import time
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path

from pydantic import ValidationError

from headrace.schemas.accounts.ledger import COUNTERS, Count, Discard, Drop, HeldBatch, Settled, WorkerTotals, plus
from headrace.schemas.accounts.recorder_file import (
    AREA,
    BEAT_NS,
    CALL,
    CALL_WORDS,
    COMMITS,
    HEADER,
    LAYOUT,
    LIMITS_MS,
    MAGIC,
    OVERDUE,
    RING,
    SILENT_UNTIL_NS,
    SINCE_NS,
    STEPPED_NS,
    UPDATED_NS,
    WatchedCall,
    newest_area,
    read_call,
    read_words,
    watched_call,
)
from headrace.schemas.accounts.user_calls import UserCall
from headrace.schemas.basics.bounds import WINDOW
from headrace.schemas.basics.run_files import opener
from headrace.schemas.errors import writing

_WORDS = RING + 3 * WINDOW
assert _WORDS == CALL
_STEPPED, _OPEN, _ENV_STEPS = (COUNTERS[name].word for name in ("stepped", "open", "env_steps"))
_COUNTED = tuple((row.word, attrgetter(row.value or name)) for name, row in COUNTERS.items() if name != "stepped")
"""Words and values of the counters that `totals` writes itself. `_commit` writes `stepped`."""
_SETTLED_SEQ, _COMMITTED, _ACCEPTED = 9, 10, 13
_DISCARDED = 16
_DROPPED = _DISCARDED + 16
_SETTLED_DROPPED = _DROPPED + 32
_DISCARDS = {reason.value: i for i, reason in enumerate(Discard)}
_DROPS = {reason.value: i for i, reason in enumerate(Drop)}


class Recorder:
    """The writing side; one process, one thread. `beat` alone may be called by another thread."""

    def __init__(self, path: Path, slot: int, incarnation: int) -> None:
        self.path = path
        with writing(path, "the recorder"):
            if not path.is_symlink():  # which `opener` refuses
                path.unlink(missing_ok=True)  # a reader that has mapped the old file would die of SIGBUS if it were cut
            with open(path, "w+b", opener=opener) as file:
                # With a sparse file, a full disk would mean SIGBUS.
                os.posix_fallocate(file.fileno(), 0, 8 * (CALL + CALL_WORDS))
                self._map = mmap.mmap(file.fileno(), 8 * (CALL + CALL_WORDS))
        self._words = memoryview(self._map).cast("q")
        self.call = self._words[CALL:]
        """The words about the call in progress, of which the first two are [kind, lane]."""
        self._areas = [self._words[HEADER + i * AREA : HEADER + (i + 1) * AREA] for i in (0, 1)]
        self._values = array("q", bytes(8 * AREA))
        self.commits = 0
        """Number of updates so far."""
        self._commit()
        for i, word in enumerate((LAYOUT, slot, incarnation, os.getpid()), start=1):
            self._words[i] = word
        self._words[0] = MAGIC

    def step(self, stepped: int, open_steps: int, env_steps: int, discarded: Mapping[str, int]) -> None:
        """Record progress between two batches: the hot path's update. It also ends an announced silence."""
        v = self._values
        v[_OPEN], v[_ENV_STEPS], v[SILENT_UNTIL_NS] = open_steps, env_steps, 0
        for reason, steps in discarded.items():
            v[_DISCARDED + _DISCARDS[reason]] = steps
        self._commit(stepped)

    def touch(self, silence_s: float = 0.0) -> None:
        """Record that the process is alive, and how long it may be silent beyond its lease from now on."""
        self._values[SILENT_UNTIL_NS] = time.monotonic_ns() + int(silence_s * 1e9)
        self._commit()

    def limit(self, kind: UserCall, limit_s: float) -> None:
        """Record how long a call of this kind may last."""
        self.call[LIMITS_MS + kind] = min(int(limit_s * 1e3), 1 << 62)

    def watched(self) -> WatchedCall:
        """Return the call in progress."""
        return watched_call(self.call)

    def beat(self, since_ns: int, *, is_overdue: bool) -> None:
        """Record that the process is alive, and in the same call since `since_ns`; or that the call is overdue."""
        self.call[SINCE_NS], self.call[OVERDUE] = since_ns, is_overdue
        if not is_overdue:
            self.call[BEAT_NS] = time.monotonic_ns()

    def totals(self, totals: WorkerTotals, batch: HeldBatch | None = None) -> None:
        """Record all totals and, with `batch`, that it was cut. Call it before the batch is sent."""
        if batch is not None:
            at = RING + 3 * (batch.seq % WINDOW)
            self._words[at], self._words[at + 1], self._words[at + 2] = batch.seq, batch.steps, batch.chunks
        v = self._values
        for word, value in _COUNTED:
            v[word] = value(totals)
        for reason, steps in totals.discarded.items():
            v[_DISCARDED + _DISCARDS[reason]] = steps
        self._counts(_DROPPED, totals.dropped)
        self._commit(totals.stepped)

    def settled(self, settled: Settled, accepted: int) -> None:
        """Record which batches of this incarnation are settled and accepted, as the broker last reported."""
        v = self._values
        v[_SETTLED_SEQ], v[_ACCEPTED] = settled.seq, accepted
        v[_COMMITTED], v[_COMMITTED + 1] = settled.committed
        self._counts(_SETTLED_DROPPED, settled.dropped)
        self._commit()

    def close(self) -> None:
        """Release the mapping; the file stays for its readers."""
        for view in (*self._areas, self.call, self._words):
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

    def _commit(self, stepped: int | None = None) -> None:
        """Show the values to readers. `stepped`: the new number of steps, where it may have grown."""
        v = self._values
        v[UPDATED_NS] = time.monotonic_ns()
        if stepped is not None and stepped != v[_STEPPED]:
            v[_STEPPED], v[STEPPED_NS] = stepped, v[UPDATED_NS]
        self.commits += 1
        self._areas[self.commits & 1][:] = self._values
        self._words[COMMITS] = self.commits


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
    watched: WatchedCall = field(default_factory=WatchedCall)


def read_recorder(path: Path) -> Reading | None:
    """Read the last commit in the file at `path`.

    None when there is no file, when its writer died before the first commit, and for a file that is not a recorder of
    this layout. Raises nothing but OSError for a file it may not read.
    """
    words = read_words(path, _WORDS)
    if words is None:
        return None
    try:
        return _reading(words, read_call(path))
    except ValidationError:
        return None


def is_unborn(path: Path) -> bool:
    """Return whether the writer of this file has recorded nothing yet, or died before it did."""
    try:
        with path.open("rb") as file:
            return not any(file.read(8))
    except FileNotFoundError:
        return True


def _reading(words: memoryview, watched: WatchedCall) -> Reading:
    v = newest_area(words)
    totals = WorkerTotals(
        **{name: v[row.word] for name, row in COUNTERS.items()},
        discarded={reason: v[_DISCARDED + i] for reason, i in _DISCARDS.items() if v[_DISCARDED + i]},
        dropped=_read_counts(v, _DROPPED),
    )
    committed, dropped = (v[_COMMITTED], v[_COMMITTED + 1]), _read_counts(v, _SETTLED_DROPPED)
    settled = Settled(seq=v[_SETTLED_SEQ], committed=committed, dropped=dropped)
    first = max(settled.seq, totals.seq - WINDOW) + 1
    window = [_read_batch(words, seq) for seq in range(first, totals.seq + 1)]
    return Reading(
        slot=words[2],
        incarnation=words[3],
        pid=words[4],
        updated_ns=v[UPDATED_NS],
        silent_until_ns=v[SILENT_UNTIL_NS],
        accepted=v[_ACCEPTED],
        totals=totals,
        settled=settled,
        window=[batch for batch in window if batch is not None],
        watched=watched,
    )


def _read_counts(values: memoryview, base: int) -> dict[str, Count]:
    counts = {reason: (values[base + 2 * i], values[base + 2 * i + 1]) for reason, i in _DROPS.items()}
    return {reason: count for reason, count in counts.items() if count != (0, 0)}


def _read_batch(words: memoryview, seq: int) -> HeldBatch | None:
    at = RING + 3 * (seq % WINDOW)
    if words[at] != seq:
        return None
    return HeldBatch(seq=seq, steps=words[at + 1], chunks=words[at + 2])
