"""The words of a recorder's file that tell of its writer's life. `recorder.py` has the rest of the file.

It needs the standard library alone, so that a check of a worker's health costs no start of a large program.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from headrace.schemas.accounts.user_calls import CallInProgress, UserCall

MAGIC = 0x4452_4F43_4552_5248
LAYOUT = 2
COMMITS = 5
HEADER = 8
AREA = 128
RING = HEADER + 2 * AREA
CALL = RING + 3 * 1024
"""Place of the words about the call in progress, after the window."""
CALL_WORDS = 16
BEAT_NS, SINCE_NS, OVERDUE, LIMITS_MS = 2, 3, 4, 8
"""Places among them, after kind and lane: the last look of the worker's own watch, when it first saw the call, whether
the call is overdue, and the limit of each kind in milliseconds.
"""

UPDATED_NS, SILENT_UNTIL_NS, STEPPED_NS = 0, 12, 15
"""Places in an area. The last one is 0 in files of writers that did not note it yet."""


@dataclass(frozen=True, slots=True)
class Pulse:
    """A writer's signs of life, in nanoseconds of the machine's monotonic clock.

    It was alive at `updated_ns`, may be silent until `silent_until_ns`, and took its last step at `stepped_ns`; 0 where
    there was none.
    """

    pid: int
    updated_ns: int
    silent_until_ns: int
    stepped_ns: int
    watched: WatchedCall


@dataclass(frozen=True, slots=True)
class WatchedCall:
    """A call of the user's code, as the worker marked it and its own watch saw it last.

    The watch looks a few times a second, unless the call keeps the interpreter's lock.
    """

    call: CallInProgress | None = None
    beat_ns: int = 0
    since_ns: int = 0
    is_overdue: bool = False

    def in_words(self, now_ns: int, updated_ns: int) -> str:
        """Say what is in progress, and for how long, after an update at `updated_ns` by the thread that samples.

        The watch has not seen the beginning of a call that keeps the interpreter's lock.
        """
        since_ns = max(self.since_ns, updated_ns)
        return self.call.in_words((now_ns - since_ns) / 1e9) if self.call is not None else ""


def seconds_of_silence(updated_ns: int, silent_until_ns: int, watched: WatchedCall, now_ns: int) -> tuple[float, float]:
    """Return (seconds since the last sign of life, how many of them are no silence).

    A call that keeps the interpreter's lock allows no sign, so a worker in a call may be silent for the call's limit.
    """
    silent_s = (now_ns - max(updated_ns, watched.beat_ns)) / 1e9
    if watched.is_overdue:
        return silent_s, 0.0
    if now_ns <= silent_until_ns:
        return silent_s, silent_s
    return silent_s, min(silent_s, watched.call.limit_s) if watched.call is not None else 0.0


def read_words(path: Path, count: int) -> memoryview | None:
    """Copy the first `count` words of the recorder at `path`, as of one commit.

    None where there is no recorder of this layout.

    After a hundred attempts the words of a writer that never pauses are returned as they are. Raises `OSError` for a
    file that this process may not read.
    """
    try:
        with path.open("rb", buffering=0) as file:
            for _ in range(100):
                found = os.pread(file.fileno(), 8 * count, 0)
                if len(found) != 8 * count:
                    return None
                if os.pread(file.fileno(), 8, 8 * COMMITS) == found[8 * COMMITS : 8 * COMMITS + 8]:
                    break
    except FileNotFoundError:
        return None
    words = memoryview(found).cast("q")
    return words if words[0] == MAGIC and words[1] == LAYOUT else None


def newest_area(words: memoryview) -> memoryview:
    """Return the area of the last commit."""
    start = HEADER + (words[COMMITS] & 1) * AREA
    return words[start : start + AREA]


def read_pulse(path: Path) -> Pulse | None:
    """Read the signs of life in the recorder at `path`, as `read_words` does."""
    words = read_words(path, RING)
    if words is None:
        return None
    area = newest_area(words)
    return Pulse(words[4], area[UPDATED_NS], area[SILENT_UNTIL_NS], area[STEPPED_NS], read_call(path))


def read_call(path: Path) -> WatchedCall:
    """Read which call of the user's code is in progress, from the recorder at `path`."""
    try:
        with path.open("rb", buffering=0) as file:
            found = os.pread(file.fileno(), 8 * CALL_WORDS, 8 * CALL)
    except FileNotFoundError:
        return WatchedCall()
    return watched_call(memoryview(found).cast("q")) if len(found) == 8 * CALL_WORDS else WatchedCall()


def watched_call(words: memoryview) -> WatchedCall:
    """Return what the words about the call in progress say."""
    kind, lane = words[0], words[1]
    if not UserCall.NONE < kind <= max(UserCall):
        return WatchedCall(beat_ns=words[BEAT_NS])
    limit_s = words[LIMITS_MS + kind] / 1e3 * max(1, -lane)
    call = CallInProgress(UserCall(kind), lane, limit_s)
    return WatchedCall(call, words[BEAT_NS], words[SINCE_NS], bool(words[OVERDUE]))
