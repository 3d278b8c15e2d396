"""The words of a recorder's file that tell of its writer's life. `recorder.py` has the rest of the file.

It needs the standard library alone, so that a check of a worker's health costs no start of a large program.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

MAGIC = 0x4452_4F43_4552_5248
LAYOUT = 2
KNOWN_LAYOUTS = (1, 2)
"""Layout 1, of the previous minor version, has no env steps."""
COMMITS = 5
HEADER = 8
AREA = 128
RING = HEADER + 2 * AREA

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


def read_words(path: Path, count: int) -> memoryview | None:
    """Copy the first `count` words of the recorder at `path`, as of one commit.

    None where there is no recorder of a known layout.

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
    return words if words[0] == MAGIC and words[1] in KNOWN_LAYOUTS else None


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
    return Pulse(words[4], area[UPDATED_NS], area[SILENT_UNTIL_NS], area[STEPPED_NS])
