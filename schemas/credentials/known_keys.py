"""The public keys in a folder, which are read again while a server runs: new ones are admitted, revoked ones are not.

A look costs one `stat` for each file. Only files that have changed are read. A file that cannot be read, such as one
that is half written, changes nothing: its earlier content stays in force. A .revoked file that cannot be read revokes
the key that its name says.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Collection, Container, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from headrace.schemas.basics.counted_warnings import CountedWarnings
from headrace.schemas.credentials.key_files import PeerKey, is_revoked_by, read_public_key
from headrace.schemas.errors import KeysError

log = logging.getLogger(__name__)

LOOK_S = 2.0
"""Seconds between two looks."""

_UNKNOWN_LOOK_S, _UNKNOWN_LOOK_RATIO = 0.05, 20
"""Seconds between two looks where a peer shows an unknown key, which may have been added a moment ago. The pause is
also at least this many times as long as the last look took, so that strangers do not keep the server busy with a large
folder.
"""

_Stamp = tuple[int, int, int]
"""ctime, size and inode. A program that copies a file may set its mtime, and new permissions do not change that."""


class KnownKeys:
    """The keys of `roles` in `folder`.

    Raises `KeysError` for a role without any key that can be read.
    """

    def __init__(self, folder: Path, roles: Collection[str]) -> None:
        self._folder = folder
        self._roles = frozenset(roles)
        self._stamps: dict[str, _Stamp] = {}
        self._files: dict[str, PeerKey] = {}
        self._keys: dict[bytes, PeerKey] = {}
        self._warnings = CountedWarnings(log)
        self.changes = 0
        """Looks that found other keys than the one before."""
        self._looked_at = time.monotonic()
        self._look_took_s = 0.0
        self._take(self._changed())
        self._keys = self._by_public()
        for role in sorted(self._roles - {key.role for key in self._keys.values()}):
            read_public_key(folder / f"{role}.public")

    def find(self, public: bytes) -> PeerKey | None:
        """Return the known key with this public half, in Z85; it may be revoked. None for an unknown one."""
        if public not in self._keys:
            self.look(min(LOOK_S, max(_UNKNOWN_LOOK_S, _UNKNOWN_LOOK_RATIO * self._look_took_s)))
        return self._keys.get(public)

    @property
    def roles(self) -> dict[bytes, str]:
        """Return the role of each key that is admitted."""
        return {public: key.role for public, key in self._keys.items() if not key.revoked}

    def look(self, older_than_s: float = LOOK_S) -> None:
        """Look at the folder, unless the last look is younger. Log each key that has changed."""
        now = time.monotonic()
        if now < self._looked_at + older_than_s:
            return
        found = self._changed()
        self._looked_at = time.monotonic()
        self._look_took_s = self._looked_at - now
        if self._take(found):
            before, self._keys = self._keys, self._by_public()
            self._tell(before)
            self.changes += before != self._keys

    def _changed(self) -> dict[str, _Stamp] | None:
        """Return the files with their stamps; None if the folder cannot be read."""
        found: dict[str, _Stamp] = {}
        try:
            with os.scandir(self._folder) as entries:
                for entry in entries:
                    name = entry.name
                    if not name.endswith((".public", ".revoked")) or name.partition(".")[0] not in self._roles:
                        continue
                    with suppress(OSError):  # it has gone meanwhile, or is a link to nothing
                        status = entry.stat()
                        if stat.S_ISREG(status.st_mode):
                            found[name] = (status.st_ctime_ns, status.st_size, status.st_ino)
        except OSError as error:
            text = f"{self._folder} cannot be read: {error.strerror}; the keys that were known stay"
            self._warnings.warn(b"", "folder", text)
            return None
        return found

    def _take(self, found: dict[str, _Stamp] | None) -> bool:
        """Read the files whose stamps have changed. Return whether any has."""
        if found is None or found == self._stamps:
            return False
        for name in self._stamps.keys() - found.keys():
            self._files.pop(name, None)
        for name in sorted(found):
            if found[name] == self._stamps.get(name):
                continue
            try:
                self._files[name] = read_public_key(self._folder / name)
            except KeysError as error:
                if name.endswith(".revoked"):
                    what = "the key that its name says counts as revoked"
                else:
                    what = "its last content stands" if name in self._files else "it is left out"
                log.warning("%s; %s", error, what)
        self._stamps = found
        return True

    def _by_public(self) -> dict[bytes, PeerKey]:
        unread = self._stamps.keys() - self._files
        revoked = {name.removesuffix(".revoked") for name in unread if name.endswith(".revoked")}
        return by_public((self._files[name] for name in sorted(self._files)), revoked)

    def _tell(self, before: dict[bytes, PeerKey]) -> None:
        for public, key in self._keys.items():
            was = before.get(public)
            if key.revoked and (was is None or not was.revoked):
                log.warning("the %s key %s is revoked", key.name, _shown(public))
            elif not key.revoked and (was is None or was.revoked):
                log.info("the %s key %s is admitted from now on", key.name, _shown(public))
        for public, key in before.items():
            if public not in self._keys and not key.revoked:
                log.warning("the %s key %s is admitted no more: its file is gone", key.name, _shown(public))


def by_public(keys: Iterable[PeerKey], unread: Container[str]) -> dict[bytes, PeerKey]:
    """Return keys by their public half. A key is revoked if any file says so, or one of the stems in `unread`."""
    found: dict[bytes, PeerKey] = {}
    for key in keys:
        first = found.get(key.public, key)
        found[key.public] = replace(first, revoked=first.revoked or key.revoked or is_revoked_by(unread, key))
    return found


def _shown(public: bytes) -> str:
    return f"{public[:8].decode()}..."
