"""Name the cases of a parametrised test by their values, where pytest would say `arguments3` or `<lambda>`."""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path
from types import FunctionType

LONGEST = 60
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_BRACKETS = re.compile(r"[][(){}'\"<>]+")


def name_of(value: object) -> str | None:
    """Return a short text of `value`; None where pytest has one, as for numbers, short text, classes and functions."""
    match value:
        case FunctionType(__name__="<lambda>"):
            text = _source(value)
        case None | int() | float() | complex() | Enum() | re.Pattern():
            return None
        case _ if isinstance(getattr(value, "__name__", None), str):
            return None
        case str():
            if 0 < len(value) <= LONGEST and "::" not in value:
                return None
            text = value.replace("::", " ")
        case bytes():
            text = " ".join(value.decode("ascii", "replace").split())
            if not text.isprintable() or "\ufffd" in text:
                return f"{len(value):,} bytes"
        case set() | frozenset():
            text = ", ".join(sorted(map(repr, value)))  # each process has an order of its own
        case list() | tuple() if any(isinstance(item, bytes) for item in value):
            text = ", ".join(name_of(item) or str(item) for item in value)
        case _:
            text = repr(value)
    plain = " ".join(_BRACKETS.sub(" ", _ADDRESS.sub("", text)).split()).replace(" ,", ",").replace(" :", ":")
    short = plain if len(plain) <= LONGEST else f"{plain[: LONGEST // 2]}...{plain[-LONGEST // 2 :]}"
    return short.strip(" ,.:=") or text.strip()[:LONGEST] or f"empty {type(value).__name__}"


def _source(function: FunctionType) -> str:
    """Return the text of a lambda's body."""
    code = function.__code__
    places = [place for place in code.co_positions() if None not in place and place[2:] != (0, 0)]
    if not places:
        return repr(code.co_consts[-1])  # Python 3.12 knows no place of a body that is a constant
    first, start = min((line, column) for line, _, column, _ in places)  # type: ignore[type-var]
    last, end = max((line, column) for _, line, _, column in places)  # type: ignore[type-var]
    lines = Path(code.co_filename).read_bytes().splitlines()[first - 1 : last]
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][start:]
    return b" ".join(lines).decode()
