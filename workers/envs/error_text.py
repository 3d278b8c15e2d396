"""Short text about a user's objects for error messages. Their own methods may raise, which is caught here."""

from __future__ import annotations

from typing import Any


def brief(value: Any, longest: int = 80) -> str:
    """Return the beginning of the value's `repr`, or its type if that raises."""
    try:
        return plain(repr(value)[:longest])
    except Exception as error:  # noqa: BLE001 - a user's class
        return f"a {type(value).__name__} (its repr raises {type(error).__name__})"


def message_of(error: BaseException) -> str:
    """Return the error's message, or a note that it cannot be read."""
    try:
        return plain(str(error))
    except Exception as broken:  # noqa: BLE001 - an error of the user's own class, whose __str__ raises
        return f"(its message cannot be read: {type(broken).__name__})"


def plain(text: str) -> str:
    """Return the text without lone surrogates, which JSON cannot hold."""
    return text.encode(errors="replace").decode()
