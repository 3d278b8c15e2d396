"""Exit records: a process that ends on purpose tells its supervisor its exit code and why.

The exit code alone proves nothing. An inline env can end its worker with any of our codes, by `os._exit(7)` for one,
and such a life counts as crashed. Each process of ours therefore writes its exit code to a file just before it ends.
The supervisor names the path. An end without a record was not on purpose.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from pydantic import BaseModel, ValidationError

from headrace.deploy.process.child_environment import EXIT_RECORD
from headrace.schemas.basics.run_files import replace_private

_BYTES = 8192
_SENTENCE = 1000
"""Characters of a sentence; as JSON each has six bytes at most."""


class ExitRecord(BaseModel):
    """The content of the file."""

    pid: int
    exit_code: int
    sentence: str = ""


def exit_record_path() -> Path | None:
    """Return the path at which the supervisor looks for our record; None without one.

    Takes the variable out of the environment: processes that we start must not write our record. Writes spaces to
    the file, which reserve room on the disk for the record.
    """
    place = Path(os.environ.pop(EXIT_RECORD, "") or os.devnull)
    if place == Path(os.devnull):
        return None
    with contextlib.suppress(OSError):
        replace_private(place, b" " * _BYTES)
    return place


def write_exit_record(place: Path | None, exit_code: int, sentence: str = "") -> None:
    """Write the record over the reserved spaces, which works on a full disk too."""
    if place is not None:
        record = ExitRecord(pid=os.getpid(), exit_code=exit_code, sentence=sentence[:_SENTENCE])
        with contextlib.suppress(OSError), place.open("r+b") as file:
            file.write(record.model_dump_json().encode().ljust(_BYTES))


def take_exit_record(place: Path, pid: int) -> ExitRecord | None:
    """Read and remove the record of process `pid`. None when there is none that can be read."""
    try:
        record = ExitRecord.model_validate_json(place.read_bytes())
    except (OSError, ValidationError):
        return None
    finally:
        with contextlib.suppress(OSError):
            place.unlink()
    return record if record.pid == pid else None
