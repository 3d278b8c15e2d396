"""Bounds the log files of a run directory: LOG and LOG.1, each of 16 MiB at most.

The files are the stdout of processes, which keep them open, so none is moved away. The end of a file that is too large
is copied to LOG.1, and the file is truncated to 0 bytes. The processes write with O_APPEND, so they go on at the new
end of the file. Text that is written between the copy and the truncation is lost.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Self

from headrace.schemas.basics.run_files import open_own

log = logging.getLogger("headrace.supervisor")

INTERVAL_S = 2.0
MOST_BYTES = 16 << 20
"""Bytes of a file, beyond which its end is moved to a second one."""
_PIECE = 1 << 20


class LogRotation:
    """Looks at all logs in a folder every two seconds, within `with`, in a thread of its own: a disk may be slow.

    A file that cannot be copied, as on a full disk, stays as it is.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log-rotation", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Look once more, and end the thread. Waits some seconds at most."""
        self._closing.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        while not self._closing.wait(INTERVAL_S):
            self._look()
        self._look()

    def _look(self) -> None:
        for path in self._folder.glob("*.log"):
            try:
                if path.stat().st_size > MOST_BYTES:
                    rotate(path, MOST_BYTES)
            except OSError as error:
                log.debug("%s cannot be rotated: %s", path, error)


def rotated_path(path: Path) -> Path:
    """Return the path of the file with the text that was cut off from the log at `path`."""
    return path.with_name(f"{path.name}.1")


def was_rotated_since(path: Path, unix_s: float) -> bool:
    """Return whether the log at `path` was cut after this time."""
    try:
        return rotated_path(path).stat().st_mtime >= unix_s
    except OSError:
        return False


def rotate(path: Path, max_bytes: int) -> None:
    """Move the last `max_bytes` of the log at `path` to its `rotated_path`. Raises `OSError`; then the log is whole.

    The copy ends with a whole line, since a read may find only a part of a line that is being written.
    """
    aside = path.with_name(f".{path.name}.new")
    source = open_own(path, os.O_RDWR)
    try:
        with os.fdopen(open_own(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as target:
            offset = max(0, os.fstat(source).st_size - max_bytes)
            most = offset + max_bytes + _PIECE  # a process may write as fast as this reads
            whole_lines = 0
            while offset < most and (piece := os.pread(source, _PIECE, offset)):
                if b"\n" in piece:
                    whole_lines = target.tell() + piece.rindex(b"\n") + 1
                target.write(piece)
                offset += len(piece)
            target.truncate(whole_lines or None)
        aside.replace(rotated_path(path))
        os.ftruncate(source, 0)
    finally:
        os.close(source)
        aside.unlink(missing_ok=True)
