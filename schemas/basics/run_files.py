"""The files of a run: how they are opened, who else may read them, and what peers of the fleet read in them.

Headrace never opens them through a symbolic link: a link that another user leaves in a folder would redirect a write to
one of this user's own files. Private files are for their owner alone.
"""

from __future__ import annotations

import errno
import os
import select
import stat
import time
from pathlib import Path
from typing import Any

import orjson

from headrace.schemas.basics.addresses import is_broker_address

RENDEZVOUS_FILE = "rendezvous.json"
"""Name of the file in the run directory where the broker publishes its addresses, unless another is named."""

_LARGEST_FILE = 16 << 20
_PART = 1 << 16


def user_state_folder() -> Path | None:
    """Return the folder of what Headrace keeps for this user, beyond one run; None for a user without a home."""
    try:
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    except RuntimeError:
        return None
    path = Path(state) / "headrace"
    return path if path.is_absolute() else None


def open_own(path: str | Path, flags: int, mode: int = 0o666) -> int:
    """Open the file at `path`, by the flags of `os.open`, and return its descriptor.

    Raises `OSError` for a symbolic link, and for any other file that is not regular.
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(None, f"{Path(path).name} is no regular file")
    return descriptor


def opener(name: str, flags: int) -> int:
    """Open a file as `open_own` does, for `open(..., opener=opener)`."""
    return open_own(name, flags)


def regular(name: str, flags: int) -> int:
    """Open a file to read it, for `open(..., opener=regular)`. A pipe, which would hold the reader, is refused.

    Raises `OSError` where there is no file, and for one that is not regular.
    """
    descriptor = os.open(name, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"{Path(name).name} is no regular file")
    return descriptor


def read_regular(path: Path, most: int = -1) -> bytes:
    """Return the content of a file, its first `most` bytes if that is given. Raises `OSError` as `regular` does."""
    with open(path, "rb", opener=regular) as file:
        return file.read(most)


def read_stream(path: Path, most: int, deadline_s: float) -> bytes:
    """Return what a pipe or a device gives until its end, and its first `most` bytes if it gives more.

    A named pipe ends once a writer came and closed it. Raises `OSError`, also after `deadline_s` without an end.
    """
    deadline, content = time.monotonic() + deadline_s, bytearray()
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        ready = select.poll()
        ready.register(descriptor, select.POLLIN)
        while len(content) < most:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not ready.poll(1000 * left_s):
                raise OSError(errno.ETIMEDOUT, f"it came to no end within {deadline_s:g} s")
            part = os.read(descriptor, min(_PART, most - len(content)))
            if not part:
                break
            content += part
        return bytes(content)
    finally:
        os.close(descriptor)


def replace_private(path: Path, content: bytes, mode: int = 0o600, *, sync: bool = True) -> None:
    """Replace the file at `path` in one step. Its owner alone can read it, whatever the umask. Raises `OSError`.

    Another `mode` may let other users read the file. A new file is on the disk before it gets its name: after a fault
    of the disk it would be empty. Where there was a file, file systems keep one of the two by themselves. Without
    `sync` it does not wait for the disk.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.unlink(missing_ok=True)  # left by a process that was killed, or by someone else
    descriptor = open_own(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            file.write(content)
            if sync and not path.exists():
                file.flush()
                os.fsync(descriptor)
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Wait until the names of the files in a folder are on the disk. Raises `OSError`."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a file that is replaced in one step; empty where there is none."""
    try:
        content = orjson.loads(read_regular(path, _LARGEST_FILE))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def rendezvous_path(named: str, run_dir: Path) -> Path:
    """Return the file to which a broker writes: `named` is `fleet.rendezvous`, which may be empty or a URL."""
    return Path(named) if named and "://" not in named else run_dir / RENDEZVOUS_FILE


def endpoint_in(run_dir: Path, role: str) -> str:
    """Return the address of the fleet in `run_dir` for peers of `role`; "" while there is none.

    It is that of the broker for "worker" and "learner", of worker 3 for "envs-3" and "clients-3", and of the page for
    "dashboard".
    """
    for name in ("broker.json", "fleet.json"):
        if endpoint := read_object(run_dir / name).get("endpoints", {}).get(role):
            return str(endpoint) if role == "dashboard" or is_broker_address(endpoint) else ""
    return ""


def run_state(run_dir: Path) -> str:
    """Return the state of the run in `run_dir`, as its supervisor noted it; "" for none."""
    return str(read_object(run_dir / "fleet.json").get("state", ""))


def mode_for_others(descriptor: int, path: Path) -> int:
    """Return the mode of an open file that others than its owner may read, else 0.

    systemd gives a service its credentials as files of root, which it lets the service's user read by an access control
    list. The mode shows that as the right of a group to read, and the group is root's. Kubernetes mounts a Secret for a
    user who is not root as files of root that the pod's own group may read.
    """
    found = os.fstat(descriptor)
    mode = stat.S_IMODE(found.st_mode)
    others = 0o037 if _is_credential(found, path) or _is_of_pod(found) else 0o077
    return mode if mode & others else 0


def open_at_once(name: str, flags: int) -> int:
    """Open a file, as an `opener`, even if it is a pipe to which no process writes: a plain open would wait."""
    return os.open(name, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _is_credential(found: os.stat_result, path: Path) -> bool:
    """Return whether systemd made this file, for this service: nothing but root may have put it there."""
    folder = os.environ.get("CREDENTIALS_DIRECTORY", "")
    if not folder or found.st_uid != 0 or found.st_gid != 0:
        return False
    try:
        about = Path(folder).stat()
    except OSError:
        return False
    return path.absolute().parent == Path(folder) and about.st_uid == 0 and not about.st_mode & 0o022


def _is_of_pod(found: os.stat_result) -> bool:
    """Return whether root gave this file to a group of ours, while we are not root: we can read it in no other way."""
    return found.st_uid == 0 != os.geteuid() and found.st_gid in {os.getegid(), *os.getgroups()} - {0}
