"""The crash-safe file of the run's rows, `metrics.jsonl`.

Each row is appended and written immediately, so a killed supervisor leaves a readable file. A partly written row is
removed. A full disk only delays rows: they are written when there is room again.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import orjson

from headrace.deploy.loggers import Row
from headrace.schemas.basics.run_files import open_own, opener

log = logging.getLogger("headrace.supervisor")

MOST_WAITING = 10_000
"""Most rows that may wait for room on the disk. Beyond it the oldest are dropped."""


class FileLogger:
    """A logger that writes rows to a file, and keeps them while the file cannot be written."""

    def __init__(self, file: JsonlFile) -> None:
        self._file = file
        self._waiting: deque[Row] = deque(maxlen=MOST_WAITING)
        self._failing = False

    def log(self, row: Row, step: int) -> None:
        """Append the waiting rows and `row`."""
        self._waiting.append(row)
        self._write()

    def close(self) -> None:
        """Try a last time to write the waiting rows."""
        self._write()
        if self._waiting:
            log.error("%s: the last %d rows could not be written", self._file.path, len(self._waiting))

    def _write(self) -> None:
        if not self._waiting:
            return
        try:
            self._file.append(list(self._waiting))
        except OSError as error:
            if not self._failing:
                reason = error.strerror or str(error)
                log.error("%s cannot be written (%s); rows wait until it can", self._file.path, reason)
            self._failing = True
            return
        if self._failing:
            log.info("%s is written again, with %d rows that waited", self._file.path, len(self._waiting))
        self._failing = False
        self._waiting.clear()


class JsonlFile:
    """A file with one JSON object on each line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mended = False

    def append(self, rows: Sequence[Row]) -> None:
        """Append each row as one line of JSON. Write all `rows`, or none and raise `OSError`."""
        if not self._mended:
            _cut_torn_line(self.path)
            self._mended = True
        _append(self.path, b"".join(orjson.dumps(dict(row), option=orjson.OPT_APPEND_NEWLINE) for row in rows))

    def rows(self, part: bytes = b"") -> Iterator[Row]:
        """Yield the rows in the file whose line contains `part`; skip lines that are not rows. Raises `OSError`."""
        try:
            with self.path.open("rb") as file:
                for line in file:
                    if part in line and (row := _row_in(line)) is not None:
                        yield row
        except FileNotFoundError:
            return


def _row_in(line: bytes) -> Row | None:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return row if line.endswith(b"\n") and isinstance(row, dict) else None


def _append(path: Path, data: bytes) -> None:
    """Append all of `data`, or nothing. Raises `OSError`."""
    descriptor = open_own(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        before = os.fstat(descriptor).st_size
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        except OSError:
            os.ftruncate(descriptor, before)
            raise
    finally:
        os.close(descriptor)


def _cut_torn_line(path: Path) -> None:
    """Remove the text after the last newline: a machine that went down may have left half a line."""
    try:
        with open(path, "r+b", opener=opener) as file:
            if end := file.seek(0, os.SEEK_END):
                with mmap.mmap(file.fileno(), end, access=mmap.ACCESS_READ) as text:
                    whole = text.rfind(b"\n") + 1
                file.truncate(whole)
    except FileNotFoundError:
        return
