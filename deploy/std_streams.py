"""Standard streams that cannot end a fleet: closed, without a reader, or of a terminal with only ASCII."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO


def open_std_streams() -> None:
    """Open stdin, stdout and stderr where this process was started without them (`>&-`).

    So no socket gets their numbers. A character that an encoding lacks is written as "?".
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
    """Discard all further output within the block once the reader of `stream` has gone (`| head`)."""
    try:
        yield
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
