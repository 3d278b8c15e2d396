"""The version of Headrace that a process runs, as peers tell it each other in HELLO.

The version is for people, and no decision depends on it. Peers check the version of the wire (`wire.py`).
"""

from __future__ import annotations

from functools import cache
from typing import Annotated

from pydantic import Field

MOST_VERSION = 64

HeadraceVersion = Annotated[str, Field(max_length=MOST_VERSION, pattern=r"^[0-9A-Za-z.!+_-]*$")]
"""A version in the characters of PEP 440; "" from a peer that does not tell it."""


@cache
def headrace_version() -> str:
    """Return the version of this process: the one that was installed when it first asked.

    It is "" where Headrace is not installed, but only on the path.
    """
    from importlib import metadata  # takes as long as all else that a light process imports

    try:
        return metadata.version("headrace")[:MOST_VERSION]
    except metadata.PackageNotFoundError:
        return ""
