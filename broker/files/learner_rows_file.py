"""run_dir/learner_rows.jsonl: rows of learners that wait for a Redis that is away. Mode 0600.

The learner keeps a row until Redis has it, and the broker has it in memory. The file is for the case that both are
killed meanwhile: the next broker hands its rows to Redis, from which `headrace up` logs them. Redis takes each row
once, so rows that it has already do no harm. The file is there only while rows wait. An append is handed to the system,
which writes it to the disk later.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace.broker.redis.rows import ReceivedRow
from headrace.schemas.basics.bounds import Natural, Version
from headrace.schemas.basics.run_files import open_own, replace_private
from headrace.schemas.messages import LearnerRow

log = logging.getLogger(__name__)

MOST_LINES = 2000
"""Lines after which the file is replaced by the rows that wait."""
_LARGEST = 64 << 20
"""Bytes of the file that are read. 2,000 rows of 20 values have 1 MB."""


class _Line(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)
    fleet_id: str
    unix_s: Annotated[float, Field(ge=0, le=1e11)]
    env_steps: Natural
    row: LearnerRow


class LearnerRowsFile:
    """The file of one fleet. One thread at a time."""

    def __init__(self, run_dir: Path, fleet_id: str) -> None:
        self._path = run_dir / "learner_rows.jsonl"
        self._fleet_id = fleet_id
        self._newest: Version = (0, 0)
        self._lines = MOST_LINES
        """Lines in the file. The first append of each life replaces it: its last line may be half a line."""
        self._failed = False

    def read(self) -> list[ReceivedRow]:
        """Return the rows in the file, in order; none where there is no file. Log and leave out what cannot be read."""
        try:
            with self._path.open("rb") as file:
                lines = file.read(_LARGEST).splitlines()
        except FileNotFoundError:
            return []
        except OSError as error:
            log.error(
                "%s cannot be read (%s); rows that the learner logged while Redis was away are lost", self._path, error
            )
            return []
        rows: list[ReceivedRow] = []
        for number, line in enumerate(lines, start=1):
            try:
                found = _Line.model_validate_json(line)
            except ValidationError as error:
                what = error.errors(include_url=False)[0]["msg"]
                log.error("left out line %d of %d in %s (%s)", number, len(lines), self._path.name, what)
                continue
            received = ReceivedRow(found.row, found.unix_s, found.env_steps)
            if found.fleet_id == self._fleet_id and (not rows or received.version > rows[-1].version):
                rows.append(received)
        return rows

    def append(self, rows: Sequence[ReceivedRow]) -> None:
        """Append those of `rows`, all that wait and in order, that the file lacks. A failure is logged once."""
        new = [received for received in rows if received.version > self._newest]
        if not new:
            return
        try:
            if self._lines + len(new) > MOST_LINES:
                replace_private(self._path, self._text(rows))
                self._lines = len(rows)
            else:
                descriptor = open_own(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
                with os.fdopen(descriptor, "ab") as file:
                    file.write(self._text(new))
                self._lines += len(new)
        except OSError as error:
            if not self._failed:
                log.warning(
                    "%s cannot be written (%s): a kill of broker and learner while Redis is away loses rows that the "
                    "learner logged",
                    self._path,
                    error,
                )
            self._failed, self._lines = True, MOST_LINES
        else:
            self._failed, self._newest = False, new[-1].version

    def clear(self) -> None:
        """Remove the file, whose rows Redis has."""
        self._lines = MOST_LINES
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            log.debug("%s cannot be removed: %s", self._path, error)

    def _text(self, rows: Sequence[ReceivedRow]) -> bytes:
        return b"".join(
            orjson.dumps({"fleet_id": self._fleet_id, **asdict(received), "row": received.row.model_dump()}) + b"\n"
            for received in rows
        )
