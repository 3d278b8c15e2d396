"""Short text about a user's objects for error messages. Their own methods may raise, which is caught here."""

from __future__ import annotations

import re

from headrace.schemas.basics.printable import plain

_OF_SEED = re.compile(
    r"\bseed|too large to convert to C|out of bounds for u?int|incompatible function argument|format requires"
    r"|must be in range\(0,",
    re.I,
)
"""Words with which libraries refuse a seed of more bits than they take."""
_C_INT = 2**31 - 1


def message_of(error: BaseException) -> str:
    """Return the error's message, or a note that it cannot be read."""
    try:
        return plain(str(error))
    except Exception as broken:  # noqa: BLE001 - an error of the user's own class, whose __str__ raises
        return f"(its message cannot be read: {type(broken).__name__})"


def seed_hint(message: str, max_env_seed: int) -> str:
    """Return the setting for smaller seeds if the error's message may be of a seed that is too large; else ""."""
    if max_env_seed <= _C_INT or _OF_SEED.search(message) is None:
        return ""
    return f"; if it takes no seed as large as {max_env_seed}, set max_env_seed = {_C_INT}"
