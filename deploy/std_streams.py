"""Output that cannot end a fleet: a closed stream, a reader that went away, a terminal that knows only ASCII."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO


def open_std_streams() -> None:
    """Give this process a stdin, stdout and stderr even where it was started without (`>&-`), so that no socket gets
    their numbers; and write what an encoding does not have as "?"."""
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
    """Within it nobody needs to read `stream`: once its reader has gone (`| head`), all further output goes nowhere."""
    try:
        yield
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
