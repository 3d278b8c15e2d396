"""The newest large weights in this machine's memory, for all processes of one user and fleet.

    /dev/shm/headrace-UID/FLEET/        mode 0700; FLEET is a hash of the fleet's id
        EPOCH-SEQ-DIGEST                one version (`weights_file.py`), mode 0600; it appears whole, and never changes
        .EPOCH-SEQ.PID                  a version that is being written
        puller                          the process that brings the next version from elsewhere holds a lock on it
        users                           each process that uses the folder holds a shared lock on it

A publisher on the broker's machine writes a version, and sends its announcement alone. The broker maps the file and
checks it. It writes the file itself if the version came from another machine. Then it announces the version to workers.
Those of its machine find the file by the version and digest of the announcement, map it, and pull nothing. On another
machine one of them pulls the version and writes it for the others. Where there is no such file, or it is not the
announced version, the broker asks for the version whole, and each worker pulls its own.

A version for which memory has no room, as in a container, lies in such a folder on disk, in `DISK`.

The last process that leaves removes the folder. After a kill, the next that enters any such folder removes it, and so
does a supervisor at the end of its fleet.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import math
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from headrace.schemas.basics.bounds import Version
from headrace.schemas.basics.process_usage import free_memory
from headrace.schemas.basics.run_files import open_own
from headrace.schemas.errors import DecodeError
from headrace.schemas.frames.wire import Buffer, MessageKind, decode
from headrace.schemas.messages import WeightsHeader
from headrace.schemas.messages.weights import Arrays, nbytes_of
from headrace.schemas.messages.weights_file import NewFile, map_frames, write_arrays, write_frames

log = logging.getLogger(__name__)

MEMORY = Path("/dev/shm")
"""Folder whose files are in memory."""

DISK = Path(tempfile.gettempdir())
"""Folder for a version that memory has no room for."""

T = TypeVar("T")

_USERS, _PULLER = "users", "puller"
_NAME = re.compile(r"(\d{1,15})-(\d{1,15})-[0-9a-f]{32}")
_ASIDE = re.compile(r"\.(\d{1,15})-(\d{1,15})\.\d+")
_TRIES = 10
"""Times to enter a folder that others remove at the same moment."""


class SharedWeights:
    """This process's access to the files of one fleet. It enters their folder with the first version.

    Nothing here waits, or raises an error of the machine: where memory cannot be shared, it warns once, and weights lie
    on disk. Where that cannot be shared either, they go over sockets.
    """

    def __init__(self, fleet_id: str) -> None:
        self._fleet_id = fleet_id
        name = hashlib.blake2b(fleet_id.encode(), digest_size=12).hexdigest()
        self._memory, self._disk = (_Folder(root, name) for root in _roots())
        self._claim: int | None = None
        self._arriving: Path | None = None
        """The file of a version that this process pulls for all."""
        self._told: set[_Folder | None] = set()

    def write(self, header: WeightsHeader, frames: list[Buffer]) -> bool:
        """Write a version for other processes, and remove older ones. Return whether it is there.

        The caller has checked the digest of the frames' arrays.
        """
        name = _name_of(header.version, header.digest)
        self.remove_older(header.version)
        if not name or any((folder.path / name).exists() for folder in self._entered()):
            return bool(name)

        def write(aside: Path) -> bool:
            write_frames(aside, frames)
            aside.replace(aside.with_name(name))
            return True

        return self._put(header.version, sum(map(len, frames)), write) or False

    def write_arrays(self, version: Version, arrays: Arrays) -> tuple[Arrays, str] | None:
        """Write a version, and return its arrays as views of the file, which they keep, and their digest.

        None where it cannot be written. Older versions stay: the broker may not have read them yet.

        Raises `EncodeError` for arrays that may not go on the wire.
        """

        def write(aside: Path) -> tuple[Arrays, str]:
            views, digest = write_arrays(aside, self._fleet_id, version, arrays)
            aside.replace(aside.with_name(_name_of(version, digest)))
            return views, digest

        return self._put(version, nbytes_of(arrays), write)

    def remove_older(self, version: Version) -> None:
        """Remove the files of versions before `version`, written whole or not."""
        for folder in self._entered():
            try:
                for path in folder.path.iterdir():
                    known = _NAME.fullmatch(path.name) or _ASIDE.fullmatch(path.name)
                    if known is not None and (int(known[1]), int(known[2])) < version:
                        path.unlink(missing_ok=True)
            except OSError as error:
                self._warn(f"{folder.path}: {error}")

    def read(self, version: Version, digest: str) -> tuple[list[Buffer], Arrays] | None:
        """Return the frames of a version's WEIGHTS message, and its arrays. None where it is not there.

        They are views of the file's memory, which they keep. The checksums of the message are checked over all bytes.
        The digest is not: the writer has taken it of these bytes, or its caller has checked it.
        """
        name = _name_of(version, digest)
        for folder in self._entered() if name else ():
            try:
                frames = map_frames(f"{folder.path}/{name}")  # pathlib takes as long as to open the file
                message = decode(frames)
            except FileNotFoundError:
                continue
            except (OSError, ValueError, DecodeError) as error:
                self._warn(f"{folder.path}: {error}")
                continue
            told = [message.kind, *map(message.header.get, ("fleet_id", "version", "digest"))]
            if told == [MessageKind.WEIGHTS, self._fleet_id, list(version), digest]:
                return frames, message.arrays
        return None

    def claim(self) -> bool:
        """Become the process that pulls the next version for this machine. Return False while another has the claim.

        The claim ends with `release`, and with the process. Where memory cannot be shared, each process pulls.
        """
        folder = next(self._entered(), None)
        if self._claim is not None or folder is None:
            return True
        try:
            claim = open_own(folder.path / _PULLER, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            self._warn(f"{folder.path}: {error}")
            return True
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(claim)
            return False
        self._claim = claim
        return True

    def progress(self) -> int:
        """Return the time at which any process last wrote to a version that is not whole; 0 if there is none."""
        times = [0]
        for folder in self._entered():
            for path in folder.path.glob(".*"):
                with suppress(OSError):  # it is whole now
                    times.append(path.stat().st_mtime_ns)
        return max(times)

    def arriving(self, version: Version, sizes: Sequence[int]) -> NewFile | None:
        """Return a file for the frames of a version that this process pulls for all. None without the claim.

        `arrived` gives it to other processes. None also where it cannot be written.
        """
        if self._claim is None:
            return None
        self.remove_older(version)

        def begin(aside: Path) -> NewFile:
            self._arriving = aside
            return NewFile(aside, sizes)

        return self._put(version, sum(sizes), begin)

    def arrived(self, header: WeightsHeader) -> None:
        """Let other processes find the file that `arriving` returned. The caller has checked the digest."""
        name, self._arriving = self._arriving, None
        if name is not None:
            try:
                name.replace(name.with_name(_name_of(header.version, header.digest)))
            except OSError as error:
                self._warn(str(error))

    def give_up(self, error: Exception | None = None) -> None:
        """Remove the file of a version that does not arrive. `error`: why it cannot be written."""
        if self._arriving is not None:
            self._arriving.unlink(missing_ok=True)
            self._arriving = None
        if error is not None:
            self._warn(str(error))

    def release(self) -> None:
        """Give the claim back, if this process has it."""
        self.give_up()
        if self._claim is not None:
            fcntl.flock(self._claim, fcntl.LOCK_UN)  # a process forked meanwhile would keep it
            os.close(self._claim)
            self._claim = None

    def close(self, *, remove: bool = True) -> None:
        """Leave the folder, and `remove` it if no process uses it. Else the next one that leaves it does."""
        self.release()
        for folder in (self._memory, self._disk):
            folder.leave(remove=remove)

    def _entered(self) -> Iterator[_Folder]:
        """Yield the folders that may have versions, in which this process takes part."""
        for folder in (self._memory, self._disk):
            if folder is self._memory or folder.path.is_dir():
                with suppress(OSError):  # `_put` tells it
                    folder.enter()
                    yield folder

    def _put(self, version: Version, nbytes: int, write: Callable[[Path], T]) -> T | None:
        """Return what `write` makes of a file for a version, in memory or else on disk; None where it cannot."""
        why = list[str]()
        for folder in (self._memory, self._disk):
            aside = folder.path / f".{version[0]}-{version[1]}.{os.getpid()}"
            try:
                folder.enter()
                _check_room(folder.path, nbytes, free_memory() if folder is self._memory else math.inf)
                done = write(aside)
            except BaseException as error:
                with suppress(OSError):
                    aside.unlink()
                if not isinstance(error, OSError | ValueError):
                    raise
                why.append(f"{folder.root}: {error}")
                continue
            if why:
                self._warn("; ".join(why), folder)
            return done
        self._arriving = None
        self._warn("; ".join(why))
        return None

    def _warn(self, why: str, folder: _Folder | None = None) -> None:
        """Say once why versions are not in memory, or in no file at all."""
        then = "they go over sockets to each process of this machine"
        if folder is not None:
            then = f"they lie in files in {folder.root}"
        level = logging.DEBUG if folder in self._told else logging.WARNING
        log.log(level, "weights are not shared in memory (%s); %s", why, then)
        self._told.add(folder)


class _Folder:
    """A fleet's folder of files in `root`, which is this user's alone. `path` is there once this process enters it."""

    def __init__(self, root: Path, name: str) -> None:
        self.root, self.path = root, root / name
        self._lock: int | None = None
        self._unusable: OSError | None = None

    def enter(self) -> None:
        """Take part in the folder. Make it if there is none. Raises `OSError`, from then on always the same."""
        if self._unusable is not None:
            raise self._unusable
        if self._lock is None:
            try:
                if not self.root.parent.is_dir():
                    raise FileNotFoundError(f"there is no {self.root.parent}")
                self._lock = _enter(self.root, self.path)
                remove_unused_weights()
            except OSError as error:
                self._unusable = error
                raise

    def leave(self, *, remove: bool) -> None:
        """Leave the folder, and `remove` it if no process uses it. Else the next one that leaves it does."""
        if self._lock is not None:
            if remove:
                _remove_unused(self.path, self._lock)
            os.close(self._lock)
            self._lock = None


def _roots() -> list[Path]:
    """Return the folders of all fleets in memory and on disk, where headrace-UID is that of a cluster's workers."""
    user = os.geteuid()
    return [MEMORY / f"headrace-{user}", DISK / f"headrace-weights-{user}"]


def remove_unused_weights() -> None:
    """Remove what killed processes of this user have left: each folder that no process uses."""
    for root in _roots():
        with suppress(OSError):  # there is none, or it is in use
            _check_own(root)
            for folder in root.iterdir():
                _remove_if_unused(folder)
            root.rmdir()


def _remove_if_unused(folder: Path) -> None:
    try:
        lock = open_own(folder / _USERS, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:
        return
    _remove_unused(folder, lock)
    os.close(lock)


def _remove_unused(folder: Path, lock: int) -> None:
    """Remove a folder if no other process holds its lock. The last process that tries removes it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return
    if _is_current(folder, lock):
        # At once, since large files take long to remove, and another process may want to enter the folder meanwhile.
        aside = folder.with_name(f".{folder.name}.{os.getpid()}")
        with suppress(OSError):
            folder.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)
        try:
            folder.parent.rmdir()
        except OSError:
            return  # other fleets use it


def _enter(root: Path, folder: Path) -> int:
    """Return a descriptor with a shared lock on the users of a folder. Raises `OSError`."""
    for _ in range(_TRIES):
        try:
            for made in (root, folder):
                with suppress(FileExistsError):  # pathlib's exist_ok raises it for one that is removed meanwhile
                    made.mkdir(mode=0o700)
                _check_own(made)
            lock = open_own(folder / _USERS, os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError:  # another process has just removed it
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if _is_current(folder, lock):
                return lock
        except BlockingIOError:  # another process is about to remove it
            pass
        os.close(lock)
    raise OSError(f"{folder} comes and goes")


def _is_current(folder: Path, lock: int) -> bool:
    """Return whether the lock's file is still the one in the folder."""
    try:
        return os.path.samestat(os.fstat(lock), (folder / _USERS).lstat())
    except FileNotFoundError:
        return False


def _check_own(folder: Path) -> None:
    """Raise `OSError` unless this is a folder that this user alone can use."""
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o077:
        raise PermissionError(f"{folder} is no folder that this user alone can use")


def _check_room(folder: Path, nbytes: int, free: float) -> None:
    """Raise `OSError` where a version would take more than half of what is left for files, or of `free` memory."""
    about = os.statvfs(folder)
    left = min(about.f_bavail * about.f_frsize, free)
    if nbytes > left // 2:
        raise OSError(f"{nbytes} bytes are more than half of the {left:.0f} that are left there")


def _name_of(version: Version, digest: str) -> str:
    """Return the name of a version's file; "" for an invalid digest."""
    name = f"{version[0]}-{version[1]}-{digest}"
    return name if _NAME.fullmatch(name) else ""
