"""The version of Headrace that a process runs, and its program, as peers tell them each other in HELLO.

They are for people, and no decision depends on them. Peers check the version of the wire (`wire.py`).
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import Field

from headrace.schemas.basics.printable import one_line

MOST_VERSION = 64
MOST_PROGRAM = 200

HeadraceVersion = Annotated[str, Field(max_length=MOST_VERSION, pattern=r"^[0-9A-Za-z.!+_-]*$")]
"""A version in the characters of PEP 440; "" from a peer that does not tell it."""


Program = Annotated[str, Field(max_length=MOST_PROGRAM)]
"""The command that started a process; "" from a peer that does not tell it."""


def program_name() -> str:
    """Return how this process was started: its script's path, `python -m MODULE`, or `python` where nothing tells.

    The end of a long path is kept. Arguments are left out, since they may hold secrets.
    """
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None and spec.name:
        name = f"python -m {spec.name.removesuffix('.__main__')}"
    else:
        script = sys.argv[0] if sys.argv else ""
        name = str(Path.cwd() / script) if script not in ("", "-c") else "python"
    return one_line(name.encode(errors="replace").decode())[-MOST_PROGRAM:]


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
