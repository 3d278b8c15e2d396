"""The folder of a fleet's Unix sockets. Its mode says who may connect: the user who owns it, and no other.

    RUN/ipc/worker, learner, weights    the broker's sockets; the folder has mode 0700
    RUN/ipc/envs-SLOT, clients-SLOT     the sockets of workers for env hosts and for clients
    RUN/ipc/NAME.lock                   held while the server of these sockets lives

Linux bounds the path of a Unix socket. Where RUN is too long, RUN/ipc is a link to a new folder below /tmp.
$XDG_RUNTIME_DIR would not do: it is removed when the user logs out, and fleets live on.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from headrace.schemas.basics.addresses import is_broker_address
from headrace.schemas.basics.run_files import open_own
from headrace.schemas.errors import ConfigError, PortInUseError, socket_folder_error
from headrace.schemas.peers.sockets import OwnSockets

SCHEME = "ipc://"
_LONGEST_PATH = 107
"""Bytes of the path of a Unix socket on Linux, without the zero at its end."""
_LONGEST_NAME = "clients-99999"
_ROOT = 0


def is_socket(endpoint: object) -> bool:
    """Return whether an endpoint is that of a Unix socket."""
    return isinstance(endpoint, str) and endpoint.startswith(SCHEME)


def endpoint_of(folder: Path, role: str) -> str:
    """Return the endpoint of the socket for peers of `role` in a folder."""
    return f"{SCHEME}{folder / role}"


def make_socket_folder(run_dir: Path) -> Path:
    """Return the folder for the sockets of the run in `run_dir`. Make it if there is none.

    Peers find the next server at the same endpoints, so the folder of an earlier one is used again. Raises
    `RunDirError` for a folder of another user, and for one that cannot be made.
    """
    folder = run_dir.absolute() / "ipc"
    try:
        if not _is_unfit(folder / _LONGEST_NAME):
            if not os.path.lexists(folder):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            about = folder.lstat()
            if stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid():
                folder.chmod(0o700)  # a copy of a run may have another mode
        else:
            folder = _linked(folder)
        _check_folder(folder)
    except OSError as error:
        raise socket_folder_error(str(error.filename or folder), f"it cannot be made ({error.strerror})") from error
    return folder


def remake_socket_folder(run_dir: Path, endpoint: str) -> Path | None:
    """Make the folder of a run's socket again, where it was removed. Return it; None where nothing is missing.

    Raises `RunDirError` where it cannot be made, as after another user made it.
    """
    folder, link = Path(endpoint.removeprefix(SCHEME)).parent, run_dir.absolute() / "ipc"
    if not is_socket(endpoint) or os.path.lexists(folder):
        return None
    try:
        folder.mkdir(mode=0o700)
        if not os.path.lexists(link):
            link.symlink_to(folder)
    except OSError as error:
        reason = f"it was removed, and cannot be made again ({error.strerror}); start the fleet again"
        raise socket_folder_error(str(folder), reason) from error
    return folder


def new_socket_folder() -> Path:
    """Make a folder for the sockets of a server without a run directory. Raises `OSError`."""
    return Path(tempfile.mkdtemp(prefix="headrace-ipc-", dir="/tmp"))


def _linked(link: Path) -> Path:
    """Return the folder to which `link` leads. Make both if there is none, or if others can use it.

    Both happen after a restart of the machine: it empties /tmp, where every user can then make a folder of that name.
    """
    if not link.is_symlink() or _fault_of(link.readlink()):
        link.parent.mkdir(parents=True, exist_ok=True)
        folder = new_socket_folder()
        aside = link.with_name(f".{link.name}.{folder.name}")
        aside.symlink_to(folder)
        aside.replace(link)
    return link.readlink()


def remove_socket_folder(run_dir: Path) -> None:
    """Remove the folder below /tmp of the run in `run_dir`, if it has one and no server has a socket there."""
    link = run_dir.absolute() / "ipc"
    with suppress(OSError):  # the run has none
        folder = link.readlink()
        if all(path.suffix == ".lock" for path in folder.iterdir()):
            shutil.rmtree(folder)
            link.unlink()


class SocketPlace:
    """The place of a worker's socket: `name` in `folder`, or for "" in a new private folder.

    A new folder ends with this object, or with the program. It stays while envs are built again: peers come back to it.
    """

    def __init__(self, folder: str, name: str) -> None:
        self.folder, self.name = Path(folder), name
        if not folder:
            self.folder = new_socket_folder()
            weakref.finalize(self, _remove_folder, self.folder, os.getpid())


def _remove_folder(folder: Path, process: int) -> None:
    """Remove the folder, but not in a copy of the process by `fork`."""
    if process == os.getpid():
        shutil.rmtree(folder, ignore_errors=True)


def lock_sockets(own: OwnSockets, folder: Path, server: str, names: Iterable[str]) -> None:
    """Lock the sockets `names` of a server in a folder. When `own` has closed them, they and the lock are gone.

    A socket that is bound replaces an older one at its path, so the lock alone keeps a second server out. Raises
    `PortInUseError` where another one lives, and `RunDirError`.
    """
    _check_folder(folder)
    try:
        lock = open_own(folder / f"{server}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise socket_folder_error(str(folder), f"its lock cannot be opened ({error.strerror})") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if isinstance(error, BlockingIOError):
            raise PortInUseError(endpoint_of(folder, server)) from None
        raise socket_folder_error(str(folder), f"it cannot be locked ({error.strerror})") from error
    own.after_end.append(partial(_release, lock, [folder / name for name in names]))


def _release(lock: int, paths: Sequence[Path]) -> None:
    for path in paths:
        with suppress(OSError):  # the disk is read-only: the next server replaces the socket
            path.unlink()
    os.close(lock)


def check_socket(endpoint: str) -> None:
    """Check that no other user can serve at the endpoint of a Unix socket. Do nothing for other endpoints.

    The socket may be created later. So may its folder, if no other user could create it. Raises `ConfigError` for a
    path that cannot be one, and `RunDirError`.
    """
    if not is_socket(endpoint):
        return
    path = Path(endpoint.removeprefix(SCHEME))
    if not path.is_absolute() or path.parent == path or _is_unfit(path):
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
            "user, or serve others by broker.host, with keys"
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


def _is_unfit(path: Path) -> bool:
    return len(os.fsencode(path)) > _LONGEST_PATH or not is_broker_address(f"{SCHEME}{path}")
