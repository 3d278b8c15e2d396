"""The folder of a broker's Unix sockets. Its mode says who may connect: the user who owns it, and no other.

    RUN/ipc/worker, learner, weights    the sockets; the folder has mode 0700
    RUN/ipc/lock                        held while the broker lives

Linux bounds the path of a Unix socket. Where RUN is too long, a new folder below /tmp takes the place of RUN/ipc, and
broker.json has its path. $XDG_RUNTIME_DIR would not do: it is removed when the user logs out, and fleets live on.
"""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from pathlib import Path

from headrace.schemas.basics.run_files import endpoint_in, open_own
from headrace.schemas.errors import ConfigError, PortInUseError, socket_folder_error

SCHEME = "ipc://"
_LONGEST_PATH = 107
"""Bytes of the path of a Unix socket on Linux, without the zero at its end."""
_LONGEST_NAME = "learner"
_ROOT = 0


def is_socket(endpoint: object) -> bool:
    """Return whether an endpoint is that of a Unix socket."""
    return isinstance(endpoint, str) and endpoint.startswith(SCHEME)


def endpoint_of(folder: Path, role: str) -> str:
    """Return the endpoint of the socket for peers of `role` in a folder."""
    return f"{SCHEME}{folder / role}"


def make_socket_folder(run_dir: Path) -> Path:
    """Return the folder for the sockets of the run in `run_dir`. Make it if there is none.

    Peers find the next broker at the same endpoints, so the folder of an earlier one is used again. Raises
    `RunDirError` for a folder in the run directory that others can use, and for one that cannot be made.
    """
    folder = run_dir.absolute() / "ipc"
    try:
        if not _is_too_long(folder / _LONGEST_NAME):
            if not os.path.lexists(folder):
                folder.mkdir(mode=0o700, exist_ok=True)
            _check_folder(folder)
            return folder
        earlier = endpoint_in(run_dir, "worker")
        if is_socket(earlier) and not _fault_of(_path_of(earlier).parent):
            return _path_of(earlier).parent
        return Path(tempfile.mkdtemp(prefix="headrace-ipc-", dir="/tmp"))
    except OSError as error:
        raise socket_folder_error(str(error.filename or folder), f"it cannot be made ({error.strerror})") from error


def lock_socket_folder(folder: Path) -> int:
    """Lock the folder for one broker. Return the lock's descriptor; closing it releases the folder.

    A socket that is bound replaces an older one at its path, so the lock alone keeps a second broker out. Raises
    `PortInUseError` where another broker lives, and `RunDirError`.
    """
    _check_folder(folder)
    try:
        lock = open_own(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise socket_folder_error(str(folder), f"its lock cannot be opened ({error.strerror})") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if isinstance(error, BlockingIOError):
            raise PortInUseError(endpoint_of(folder, "worker")) from None
        raise socket_folder_error(str(folder), f"it cannot be locked ({error.strerror})") from error
    return lock


def check_socket(endpoint: str) -> None:
    """Check that no other user can serve at the endpoint of a Unix socket. Do nothing for other endpoints.

    The socket may be created later. So may its folder, if no other user could create it. Raises `ConfigError` for a
    path that cannot be one, and `RunDirError`.
    """
    if not is_socket(endpoint):
        return
    path = _path_of(endpoint)
    if not path.is_absolute() or path.parent == path or _is_too_long(path):
        limit = f"ipc:///PATH, with a path of at most {_LONGEST_PATH} bytes"
        raise ConfigError(f"the address should be {limit}, got {endpoint!r:.160}")
    try:
        if os.path.lexists(path.parent):
            _check_folder(path.parent)
        else:
            _check_parents(path.parent)
    except OSError as error:
        raise socket_folder_error(str(path.parent), f"it cannot be looked at ({error.strerror})") from error


def _check_folder(folder: Path) -> None:
    if fault := _fault_of(folder):
        raise socket_folder_error(str(folder), fault)


def _fault_of(folder: Path) -> str:
    """Return why others could use the sockets in a folder, or replace them; "" if they cannot."""
    try:
        about = folder.lstat()
    except FileNotFoundError:
        return "there is none"
    if not stat.S_ISDIR(about.st_mode):
        return "it is a symbolic link, or no folder; remove it, and start the broker again"
    if about.st_uid != os.geteuid():
        return (
            f"it belongs to user {about.st_uid}, and this is user {os.geteuid()}; Unix sockets serve one user: be that "
            "user, or serve others by broker.transport = 'tcp'"
        )
    mode = stat.S_IMODE(about.st_mode)
    if mode & 0o077:
        return f"others may use it (mode {mode:04o}); chmod 700 it if it is for these sockets alone, or name another"
    return ""


def _check_parents(folder: Path) -> None:
    """Raise `RunDirError` where others could make the missing folder, and so pose as the broker."""
    above = next(parent for parent in folder.parents if parent.exists())
    about = above.stat()
    if about.st_uid not in (os.geteuid(), _ROOT) or about.st_mode & 0o022:
        advice = "check the address, or start the fleet first"
        raise socket_folder_error(str(folder), f"there is none, and others may make it in {above}; {advice}")


def _path_of(endpoint: str) -> Path:
    return Path(endpoint.removeprefix(SCHEME))


def _is_too_long(path: Path) -> bool:
    return len(os.fsencode(path)) > _LONGEST_PATH
