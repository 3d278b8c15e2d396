"""Paths of workers' flight recorders: RUN_DIR/recorders/worker-SLOT-INCARNATION.rec."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_NAME = re.compile(r"worker-(\d{1,9})-([1-9]\d{0,8})\.rec")

Life = tuple[int, int]
"""(slot, incarnation)."""


def recorder_path(recorders: Path, slot: int, incarnation: int) -> Path:
    """Return the path of this life's recorder."""
    return recorders / f"worker-{slot}-{incarnation}.rec"


def recorders_in(folder: Path) -> Iterator[tuple[Life, Path]]:
    """Yield all recorders in the folder, in order of their names; other files are left alone."""
    for path in sorted(folder.iterdir()):
        match = _NAME.fullmatch(path.name)
        if match is not None and path.is_file():
            yield (int(match[1]), int(match[2])), path
