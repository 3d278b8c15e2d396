"""The last word of a process that ends on purpose: its exit code, and why, told to its supervisor.

The code alone proves nothing. An env inline can end its worker with any of ours, by `os._exit(7)` for one, and that
life is like one that crashed. So a process of ours writes down, at its edge, with which code it is about to end, where
its supervisor has asked it to; what is written nowhere was not meant.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from pydantic import BaseModel, ValidationError

VARIABLE = "HEADRACE_EXIT_RECORD"
"""Environment variable with the path of the file."""


class ExitRecord(BaseModel):
    """The content of the file."""

    pid: int
    exit_code: int
    sentence: str = ""
    """Of the error that ended it."""


def exit_record_path() -> Path | None:
    """Where the supervisor looks for ours; None when nobody does. Asked once: what we start is not to answer for us."""
    place = os.environ.pop(VARIABLE, "")
    return Path(place) if place else None


def write_exit_record(place: Path | None, exit_code: int, sentence: str = "") -> None:
    """Write it down. On a full disk it remains unsaid, and the supervisor starts this process again."""
    if place is not None:
        with contextlib.suppress(OSError):
            place.write_text(ExitRecord(pid=os.getpid(), exit_code=exit_code, sentence=sentence).model_dump_json())


def take_exit_record(place: Path, pid: int) -> ExitRecord | None:
    """What the process of this pid has said; the file is gone then. None when it said nothing that can be read."""
    try:
        word = ExitRecord.model_validate_json(place.read_bytes())
        place.unlink()
    except (OSError, ValidationError):
        return None
    return word if word.pid == pid else None
