"""The list of this user's servers on loopback that ask for a token. By it the user's own peers find the token by port.

    ~/.local/state/headrace/ports/HOST-PORT    the token; mode 0600

A server lists its ports once they are bound, and holds a lock on each file for as long as it lives. So a peer knows
the file of a server that was killed from that of one that lives, and the next server removes it. $XDG_STATE_HOME may
name another folder than ~/.local/state.
"""

from __future__ import annotations

import fcntl
import logging
import os
import platform
import re
import secrets
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice
from pathlib import Path
from urllib.parse import urlsplit

from headrace.schemas.basics.run_files import open_own, user_state_folder
from headrace.schemas.credentials.loopback_token import LoopbackToken, found_token
from headrace.schemas.errors import KeysError

log = logging.getLogger(__name__)

_NAME = re.compile(r"[^A-Za-z0-9.-]+")
_LONGEST_HOST = 100
_MOST_SWEPT = 1000
"""Files at which one sweep looks."""
_UNBORN_S = 60.0
"""Seconds for which a file that is not locked may still be in the making."""


class PortListing:
    """The entries of one server's ports, until `remove`. They end with the process, too.

    Where they cannot be written, one warning says so, and peers find the token in the run directory only.
    """

    def __init__(self, endpoints: Iterable[str], word: str) -> None:
        self._entries: list[tuple[int, Path]] = []
        ports = [urlsplit(endpoint).port or 0 for endpoint in endpoints]
        try:
            for port in ports:
                self._add(_path_of(port), word)
            if self._entries:
                with suppress(OSError):
                    _sweep(self._entries[0][1].parent)
        except OSError as error:
            self.remove()
            log.warning(
                "peers that know only the address of ports %s do not find their token: %s cannot be written (%s); "
                "name the run directory in their keys.dir, or give --run-dir",
                ", ".join(map(str, ports)),
                error.filename or "the user's state folder",
                error.strerror,
            )

    def _add(self, path: Path, word: str) -> None:
        """Write one entry. It is locked before other processes can see it."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        aside = _aside(path)
        lock = open_own(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        self._entries.append((lock, path))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(lock, word.encode() + b"\n")
            aside.replace(path)
        except OSError:
            aside.unlink(missing_ok=True)
            raise

    def remove(self) -> None:
        """Remove the entries, unless a later server has replaced them."""
        for lock, path in self._entries:
            try:
                if os.path.samestat(os.fstat(lock), os.lstat(path)):
                    path.unlink()
            except OSError as error:
                log.debug("%s stays: %s", path, error.strerror)
            os.close(lock)
        self._entries.clear()


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")


def _sweep(folder: Path) -> None:
    """Remove the files of this user's servers on this machine that were killed before they could remove them."""
    own = re.compile(rf"\.?{re.escape(_host())}-\d+(\.\d+\.[0-9a-f]+)?")
    with os.scandir(folder) as entries:
        paths = [folder / entry.name for entry in islice(entries, _MOST_SWEPT) if own.fullmatch(entry.name)]
    for path in paths:
        with suppress(OSError):
            _remove_dead(path)


def _remove_dead(path: Path) -> None:
    """Remove a file that no server has locked. If a new server has replaced it meanwhile, put the new file back."""
    descriptor = open_own(path, os.O_RDONLY)
    try:
        about = os.fstat(descriptor)
        is_unborn = path.name.startswith(".") and time.time() < about.st_mtime + _UNBORN_S
        if about.st_uid != os.geteuid() or is_unborn or _is_locked(descriptor):
            return
        if path.name.startswith("."):
            path.unlink()
            return
        aside = _aside(path)
        path.rename(aside)
        if not os.path.samestat(about, os.lstat(aside)):
            with suppress(FileExistsError):
                os.link(aside, path)
        aside.unlink()
    finally:
        os.close(descriptor)


def listed_token(port: int, role: str) -> LoopbackToken | None:
    """Return the token for which this user's server at `port` asks; None if no living server has listed one."""
    try:
        path = _path_of(port)
        descriptor = open_own(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        about = os.fstat(descriptor)
        if about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) & 0o077 or not _is_locked(descriptor):
            return None
        return found_token(path, role)
    except KeysError:
        return None
    finally:
        os.close(descriptor)


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _path_of(port: int) -> Path:
    """Raise `OSError` for a user without a home."""
    folder = user_state_folder()
    if folder is None:
        raise OSError(None, "this user has no home")
    return folder / "ports" / f"{_host()}-{port}"


def _host() -> str:
    return _NAME.sub("-", platform.node())[:_LONGEST_HOST]
