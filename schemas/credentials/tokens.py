"""Tokens by which a peer proves that it is the same peer as before, or that it may read its user's files.

They are compared in constant time, and kept as digests.
"""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from headrace.schemas.basics.run_files import mode_for_others, open_at_once
from headrace.schemas.errors import KeysError

_SHORTEST, _LARGEST_FILE = 16, 4096
_REMEDY = "headrace keys init makes one"


def same_token(one: str, other: str) -> bool:
    """Return whether two tokens are equal. The time it takes says nothing about where they differ."""
    return hmac.compare_digest(one.encode(), other.encode())


def digest_of(token: str) -> str:
    """Return a digest of a token, to keep where others can read it: it cannot be used in place of the token."""
    return hashlib.sha256(b"headrace token\n" + token.encode()).hexdigest()


def read_token(path: Path) -> str:
    """Return the one word in the file at `path`. Raises `KeysError`, which says what to do."""
    try:
        with open(path, "rb", opener=open_at_once) as file:
            if mode := mode_for_others(file.fileno(), path):
                raise KeysError(str(path), f"others may read it (mode {mode:04o}); chmod 600 {path}")
            token = file.read(_LARGEST_FILE).decode("ascii").strip()
    except FileNotFoundError as error:
        raise KeysError(str(path), f"there is no such file; {_REMEDY}") from error
    except OSError as error:
        raise KeysError(str(path), f"it cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise KeysError(str(path), f"it is damaged: not of ASCII characters; {_REMEDY}") from error
    if len(token) < _SHORTEST or not token.isprintable() or " " in token:
        raise KeysError(str(path), f"it should hold one word of at least {_SHORTEST} characters; {_REMEDY}")
    return token
