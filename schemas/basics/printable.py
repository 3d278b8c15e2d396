"""Text of peers, made fit for a terminal, and of users' values, made fit for an error."""

from __future__ import annotations

import re
import shlex
from typing import Any

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    r"""Return `text` with control characters as escapes such as \x1b. Newlines and tabs stay.

    A terminal obeys some of them: they move the cursor, colour or hide text, or turn its direction around. JSON stays
    the same JSON: it has escapes of its own for those below a space.
    """
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1] if found[0] < " " else f"\\u{ord(found[0]):04x}", text)


def one_line(text: str) -> str:
    r"""Return `text` as `printable` does, newlines and tabs as \n and \t: a peer cannot begin a line of its own."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def brief(value: Any, longest: int = 80) -> str:
    """Return the beginning of a user's value as `repr` gives it, or its type where that raises: for a large int too."""
    try:
        return plain(repr(value)[:longest])
    except Exception as error:  # noqa: BLE001 - a user's class
        return f"a {type(value).__name__} (its repr raises {type(error).__name__})"


def to_paste(word: object) -> str:
    """Return a path, or another word of a command, quoted where a shell needs that."""
    return shlex.quote(str(word))


def plain(text: str) -> str:
    """Return the text without lone surrogates, which JSON cannot hold."""
    return text.encode(errors="replace").decode()


def without_episode(text: str) -> str:
    """Return the words of a failure without the 32 digits of its episode's id. Logs keep the id."""
    return re.sub(r" of episode [0-9a-f]{32}\b", "", text)
