"""The bearer token of a policy server's HTTP clients, in a file that only its owner may read."""

from __future__ import annotations

import os
from pathlib import Path

from headrace.schemas.errors import KeysError

_SHORTEST, _LARGEST_FILE = 16, 4096


def read_token(path: Path) -> str:
    """Return the token in the file at `path`. Raises `KeysError`, which says what to do."""
    try:
        with path.open("rb") as file:
            if (mode := os.fstat(file.fileno()).st_mode & 0o777) & 0o077:
                raise KeysError(str(path), f"others may read it (mode {mode:04o}); chmod 600 {path}")
            token = file.read(_LARGEST_FILE).decode("ascii").strip()
    except FileNotFoundError as error:
        raise KeysError(str(path), "there is no such file; headrace keys init makes one") from error
    except OSError as error:
        raise KeysError(str(path), f"it cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise KeysError(str(path), "it is not of ASCII characters") from error
    if len(token) < _SHORTEST or not token.isprintable() or " " in token:
        raise KeysError(str(path), f"it should hold one word of at least {_SHORTEST} characters")
    return token
