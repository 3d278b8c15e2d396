"""The seal on the settings files of a run, by which Headrace recognises files that it wrote for this user.

A settings file names code. `up` seals each one that it writes, so that later commands need not ask about the user's own
runs. The seal is an HMAC of the file's content. Its key lies in the user's home, and never in a run directory. A file
that was edited, or came from another user or machine, has no valid seal.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
from contextlib import suppress
from pathlib import Path

from headrace.deploy.run.run_dir import write_private
from headrace.schemas.basics.run_files import opener, read_regular, replace_private, user_state_folder

log = logging.getLogger("headrace.deploy")

_KEY_BYTES = 32
_MOST_BYTES = 64 << 20


def write_sealed(path: Path, content: bytes) -> None:
    """Replace the file at `path`, readable by its owner alone, and its seal. Raises `RunDirError`.

    Without a writable home directory there is no seal, and commands ask about the names in the file.
    """
    write_private(path, content)
    key = _key() or _new_key()
    if key is not None:
        write_private(seal_of(path), _digest(key, content))


def is_sealed(path: Path) -> bool:
    """Return whether this user's Headrace wrote the content of the file at `path`."""
    key = _key()
    if key is None:
        return False
    try:
        content, seal = read_regular(path, _MOST_BYTES), read_regular(seal_of(path), 2 * len(key) + 1)
    except OSError:
        return False
    return hmac.compare_digest(seal, _digest(key, content))


def seal_of(path: Path) -> Path:
    """Return the path of the seal of the file at `path`."""
    return path.with_name(f".{path.name}.seal")


def _digest(key: bytes, content: bytes) -> bytes:
    return hmac.new(key, b"headrace settings file\n" + content, "sha256").hexdigest().encode()


def _key_path() -> Path | None:
    folder = user_state_folder()
    return folder / "seal.key" if folder is not None else None


def _key() -> bytes | None:
    """Return the user's key; None where there is none, or where others may read or replace it."""
    path = _key_path()
    if path is None:
        return None
    with suppress(OSError), open(path, "rb", opener=opener) as file:
        about, key = os.fstat(file.fileno()), file.read(_KEY_BYTES + 1)
        if about.st_uid == os.geteuid() and not about.st_mode & 0o077:
            return key if len(key) == _KEY_BYTES else None
        log.warning("%s is not used: it should be a file of this user that others cannot read", path)
    return None


def _new_key() -> bytes | None:
    path = _key_path()
    if path is None or path.exists():
        return None
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_private(aside, secrets.token_bytes(_KEY_BYTES))
        with suppress(FileExistsError):  # another process of this user made the key first: both read that one
            os.link(aside, path)
        aside.unlink()
    except OSError as error:
        log.debug("no seal on the run's settings: %s cannot be written (%s)", path, error.strerror)
        return None
    return _key()
