"""The token of a run's servers on loopback, where every user of the machine can connect.

    RUN/token    one word; mode 0600

A peer shows it as its password, with its role as its user name (ZeroMQ's PLAIN). It is not encrypted, so no peer shows
it off loopback: servers there have keys (`keys.py`). A server that asks for no token removes the file, so that its
peers show none.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from headrace.schemas.basics.run_files import open_own
from headrace.schemas.credentials.tokens import read_token, same_token
from headrace.schemas.errors import KeysError, writing

_BYTES = 32
_LONGEST = 255
"""libzmq takes no longer password."""


@dataclass(frozen=True, slots=True)
class LoopbackToken:
    """The token that a peer of `role` shows.

    `path` is where it came from. The user has `named` it, or it was found.
    """

    role: str
    word: str = field(repr=False)
    path: Path = field(compare=False)
    named: bool = field(default=False, compare=False)

    def options(self) -> dict[str, bytes]:
        """Return the socket options to set before connecting, by their ZeroMQ names."""
        return {"PLAIN_USERNAME": self.role.encode(), "PLAIN_PASSWORD": self.word.encode()}


@dataclass(frozen=True, slots=True)
class ServerToken:
    """The token for which a server on loopback asks."""

    word: str = field(repr=False)

    def options(self, port: str) -> dict[str, bytes | int]:
        """Return options of the socket that serves `port`. ENFORCE_DOMAIN: without a ZAP handler no peer gets in."""
        return {"PLAIN_SERVER": 1, "ZAP_DOMAIN": port.encode(), "ZAP_ENFORCE_DOMAIN": 1}

    def role_of(self, shown: Sequence[bytes]) -> str:
        """Return the role of a peer that shows (role, word); "" if the word is another one."""
        if len(shown) != 2 or not same_token(self.word, shown[1].decode(errors="replace")):
            return ""
        return shown[0].decode(errors="replace")


def token_path(run_dir: Path) -> Path:
    """Return the path of the token of the run in `run_dir`."""
    return run_dir / "token"


def server_token(run_dir: Path, *, asked: bool) -> ServerToken | None:
    """Return the token for which the servers of this run ask. Make it if there is none. Remove it if it is not `asked`.

    Raises `RunDirError` where it cannot be written, and `KeysError` where others may read it.
    """
    path = token_path(run_dir)
    with writing(run_dir):
        if not asked:
            path.unlink(missing_ok=True)
            return None
        if not os.path.lexists(path):
            _make(path)
        owner = os.lstat(path).st_uid
    if owner != os.geteuid():
        raise KeysError(str(path), f"it belongs to user {owner}; remove it and start the fleet again")
    return ServerToken(_read(path, "remove it, and start the fleet again: that makes another"))


def token_for_port(folder: Path) -> ServerToken | None:
    """Return the token of the run in `folder`, or in this file, for a port of its workers; None for a folder of keys.

    Raises `KeysError`.
    """
    path = folder if folder.is_file() else token_path(folder)
    return ServerToken(_read(path)) if path.exists() and not has_secret(folder, "worker") else None


def has_secret(folder: Path, role: str) -> bool:
    """Return whether a folder has a secret key of a role, of any group."""
    return (folder / f"{role}.secret").exists() or any(folder.glob(f"{role}.*.secret"))


def _make(path: Path) -> None:
    """Make the file, unless another process is first. A reader finds all of the token, or no file."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(open_own(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(_BYTES) + "\n")
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def token_of_run(run_dir: Path, role: str) -> LoopbackToken | None:
    """Return the token of the run in `run_dir`; None if its servers ask for none. Raises `KeysError`."""
    path = token_path(run_dir)
    return found_token(path, role) if path.exists() else None


def found_token(path: Path, role: str) -> LoopbackToken:
    """Return the token in a file that the user did not name. Raises `KeysError`."""
    return LoopbackToken(role, _read(path), path)


def read_named_token(path: Path, role: str) -> LoopbackToken:
    """Return the token in a file that the user named. Raises `KeysError`."""
    return LoopbackToken(role, _read(path), path, named=True)


_COPY = (
    "copy it again from the fleet's run directory; if it is damaged there, remove it there and start the fleet again: "
    "that makes another"
)


def _read(path: Path, remedy: str = _COPY) -> str:
    word = read_token(path, remedy)
    if len(word) > _LONGEST:
        raise KeysError(str(path), f"it should hold one word of at most {_LONGEST} characters; {remedy}")
    return word
