"""Paths of workers' flight recorders: RUN_DIR/recorders/worker-SLOT-INCARNATION.rec."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from headrace.schemas.accounts.ledger import LedgerRow
from headrace.schemas.accounts.recorder import Reading, read_recorder
from headrace.schemas.errors import RunDirError, is_there, removed_error

_NAME = re.compile(r"worker-(\d{1,9})-([1-9]\d{0,8})\.rec")

Life = tuple[int, int]
"""(slot, incarnation)."""


def recorder_path(recorders: Path, slot: int, incarnation: int) -> Path:
    """Return the path of this life's recorder."""
    return recorders / f"worker-{slot}-{incarnation}.rec"


def recorders_in(folder: Path) -> Iterator[tuple[Life, Path]]:
    """Yield all recorders in the folder, in order of their names; other files are left alone.

    Raises `RunDirError` for a folder that cannot be read.
    """
    try:
        paths = sorted(folder.iterdir())
    except FileNotFoundError as error:
        raise removed_error(str(folder)) from error
    except OSError as error:
        raise RunDirError(str(folder), f"it cannot be read ({error.strerror})") from error
    for path in paths:
        match = _NAME.fullmatch(path.name)
        if match is not None and is_there(path) and path.is_file():
            yield (int(match[1]), int(match[2])), path


def has_delivered(recorder: Path) -> bool:
    """Return whether a step of the recorder's life is committed, as far as its worker was told."""
    reading = read_recorder(recorder)
    return reading is not None and reading.settled.committed[0] > 0


def covers(row: LedgerRow, reading: Reading | None) -> bool:
    """Return whether a ledger row is closed and knows all steps and batches of the life's recorder."""
    seq, stepped = (reading.totals.seq, reading.totals.stepped) if reading is not None else (0, 0)
    return row.closed and row.totals.seq >= seq and row.totals.stepped >= stepped


def is_written_to(recorder: Path, pid: int) -> bool:
    """Return whether the writer lives: it has the file mapped, unlike another process that was given its pid.

    Raises `OSError` where that cannot be known, as without a descriptor.
    """
    try:
        return str(recorder.resolve()) in Path(f"/proc/{pid}/maps").read_text()
    except PermissionError:
        return True
    except (FileNotFoundError, ProcessLookupError):
        return False
