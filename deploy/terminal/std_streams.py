"""Standard streams that cannot stop a fleet, even if closed, without a reader, or on an ASCII-only terminal."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import TextIO

from headrace.schemas.basics.printable import printable

_terminal = threading.RLock()


def open_std_streams() -> None:
    """Open stdin, stdout and stderr where this process was started without them (`>&-`).

    Otherwise a socket could get their numbers. A character that an encoding lacks is written as "?".
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


@contextmanager
def ignore_closed_reader(stream: TextIO) -> Iterator[None]:
    """Discard all further output within the block once the reader of `stream` has gone (`| head`).

    On a disk that is full, read-only or broken, only what cannot be written is discarded. One thread at a time writes
    to a terminal: a live table erases what it has drawn, and where two threads draw it erases lines of the log.
    """
    try:
        with _terminal if _is_terminal(stream) else nullcontext():
            yield
    except BrokenPipeError:
        _send_nowhere(stream)
    except OSError:
        with suppress(OSError):  # no descriptor is left
            kept = os.dup(stream.fileno())
            _send_nowhere(stream)
            stream.flush()  # else the next line, or the end of this process, would try the same text again
            os.dup2(kept, stream.fileno())
            os.close(kept)


def say(line: str, stream: TextIO | None = None) -> None:
    """Print a `printable` line to `stream`, by default stdout, as in `ignore_closed_reader`."""
    stream, line = stream or sys.stdout, printable(line)
    try:
        with ignore_closed_reader(stream):
            print(line, file=stream, flush=True)
    except (AttributeError, TypeError, ValueError):  # an env has closed it, or put an object in its place
        with suppress(OSError):
            os.write(2 if stream is sys.stderr else 1, f"{line}\n".encode(errors="replace"))


def _is_terminal(stream: TextIO) -> bool:
    """Return whether a stream writes to a terminal. That of a live display of rich before 15 denies it itself."""
    try:
        return os.isatty(stream.fileno())
    except (AttributeError, OSError, TypeError, ValueError):
        return False


def _send_nowhere(stream: TextIO) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
