"""What a user's objects say of themselves, in a few words: their methods may raise like any other code of theirs."""

from __future__ import annotations

from typing import Any


def brief(value: Any, longest: int = 80) -> str:
    """The beginning of its `repr`, or what it is if it has none."""
    try:
        return plain(repr(value)[:longest])
    except Exception as error:  # noqa: BLE001 - a user's class
        return f"a {type(value).__name__} (its repr raises {type(error).__name__})"


def message_of(error: BaseException) -> str:
    """What an error says, if it can be read."""
    try:
        return plain(str(error))
    except Exception as broken:  # noqa: BLE001 - an error of the user's own class, whose __str__ raises
        return f"(its message cannot be read: {type(broken).__name__})"


def plain(text: str) -> str:
    """Without lone surrogates, which are no JSON."""
    return text.encode(errors="replace").decode()
