"""Judges whether a file that holds a secret is for its owner alone, or for this process alone."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_CREDENTIALS = "CREDENTIALS_DIRECTORY"
"""Environment variable in which systemd names the folder of a service's credentials."""


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
    folder = os.environ.get(_CREDENTIALS, "")
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
