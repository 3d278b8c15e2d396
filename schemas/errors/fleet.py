"""Errors of the fleet's surroundings: settings, keys, files, ports, servers, processes and books."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.schemas.errors.root import ExitCode, HeadraceError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""Numbers of the errors of a full disk and of a used-up quota."""
_NO_FILE = (None, errno.ENOENT, errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENXIO)
_REMEDIES = {
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the limit of open files of this machine (fs.file-max)",
    errno.EIO: "look for the disk's fault in the log of the system (dmesg), repair it",
    errno.EROFS: "mount it for writing",
    errno.ESTALE: "mount the network's folder again",
    errno.ETIMEDOUT: "see that the network's folder answers",
}
"""Remedies for errors of the machine, by error number."""


class ConfigError(HeadraceError):
    """A setting is unknown, malformed or clashes with another. `key` names it, `source` says where it came from."""

    exit_code = ExitCode.CONFIG

    def __init__(self, message: str, *, key: str | None = None, source: str | None = None) -> None:
        self.key, self.source = key, source
        where = f" (from {source})" if source else ""
        super().__init__(f"{key}: {message}{where}" if key else f"{message}{where}")


class KeysError(HeadraceError):
    """The key file or folder at `path` cannot be used. `reason` says why, and what to do."""

    exit_code = ExitCode.KEYS

    def __init__(self, path: str, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(f"keys: {path} cannot be used: {reason}")


class UnreachableError(HeadraceError):
    """`endpoint` did not answer within `deadline_s` seconds. `seen` says what it did instead, and what to do.

    `setting` is the one that gives it longer.
    """

    exit_code = ExitCode.UNREACHABLE

    def __init__(
        self, what: str, endpoint: str, deadline_s: float, seen: str = "", *, setting: str = "", sentence: str = ""
    ) -> None:
        self.endpoint, self.deadline_s = endpoint, deadline_s
        where = " on this machine" if endpoint.startswith("ipc:") else ""
        longer = f", or raise {setting}" if setting else ""
        advice = seen or f"check that it runs{where} and the address is right{longer}"
        super().__init__(sentence or f"no {what} answers at {endpoint} after {deadline_s:g} s; {advice}")


def no_fleet_error(endpoint: str, problem: str) -> UnreachableError:
    """Return the error for a rendezvous at `endpoint` that names no fleet that runs, for the reason `problem`."""
    sentence = f"no fleet is found: {problem}; start the fleet, or correct --rendezvous"
    return UnreachableError("fleet", endpoint, 0.0, sentence=sentence)


class RedisUnavailableError(UnreachableError):
    """Redis did not answer, or refuses writes. `endpoint` is its URL without the password, `advice` what to do."""

    exit_code = ExitCode.REDIS_UNAVAILABLE

    def __init__(
        self,
        url: str,
        reason: str,
        deadline_s: float = 0.25,
        advice: str = "start it, correct --redis-url, or leave it out",
    ) -> None:
        self.endpoint = re.sub(r"//.*@", "//***@", url, flags=re.DOTALL)
        self.deadline_s, self.reason = deadline_s, reason
        HeadraceError.__init__(self, f"Redis at {self.endpoint} cannot be used: {reason}; {advice}")


class RedisContractError(RedisUnavailableError):
    """Redis has the fleet's keys by another version of the contract than this Headrace reads and writes."""

    exit_code = ExitCode.VERSION_MISMATCH

    def __init__(self, url: str, fleet_id: str, seen: str, known: int) -> None:
        self.fleet_id, self.seen = fleet_id, seen
        reason = f"it has fleet {fleet_id!r} by contract {seen[:20]!r}, and this Headrace knows contract {known} alone"
        advice = f"use the version that wrote it, or remove it with `headrace redis forget {fleet_id}`"
        super().__init__(url, reason, advice=advice)


class PortInUseError(HeadraceError):
    """An endpoint is taken by another process. `setting` is the one, or the option, that names another."""

    exit_code = ExitCode.PORT_IN_USE

    def __init__(self, endpoint: str, setting: str = "") -> None:
        self.endpoint = endpoint
        other = "run directory" if endpoint.startswith("ipc:") else setting or "host or range of ports"
        super().__init__(f"{endpoint} is already in use; stop the process that holds it, or choose another {other}")


class RunDirError(HeadraceError):
    """The run directory at `path`, or something in it, cannot be used. `advice` says what to do."""

    exit_code = ExitCode.RUN_DIR

    def __init__(
        self, path: str, reason: str, advice: str = "choose another with --run-dir", *, sentence: str = ""
    ) -> None:
        self.path = path
        super().__init__(sentence or f"run directory {path} cannot be used: {reason}; {advice}")


def disk_full_error(path: str, what: str = "") -> RunDirError:
    """Return the error for `what`, which no room is left for at `path`: on the disk, or in the user's quota."""
    sentence = (
        f"the disk is full: {what or 'a file'} cannot be written at {path}; free some space there (or raise your "
        "quota), then go on with headrace up --resume RUN"
    )
    return RunDirError(path, "the disk is full", sentence=sentence)


def socket_folder_error(path: str, reason: str) -> RunDirError:
    """Return the error for a folder of Unix sockets that others could use too. `reason` says what to do."""
    return RunDirError(path, reason, sentence=f"the folder of Unix sockets {path} cannot be used: {reason}")


def removed_error(path: str, seen: str = "") -> RunDirError:
    """Return the error for a folder of a run that was removed at `path` while its fleet ran."""
    return RunDirError(path, f"it was removed while the fleet ran{seen}", "start the fleet again")


def write_error(path: str, error: OSError, what: str = "", done: str = "written") -> RunDirError:
    """Return the error for `what`, which could not be `done` at `path` because of `error`."""
    if error.errno in NO_ROOM:
        return disk_full_error(path, what)
    reason = error.strerror or str(error)
    reason = f"{what} cannot be {done} ({reason})" if what else reason
    remedy = _REMEDIES.get(error.errno or 0)
    if remedy is None and (not what or error.errno == errno.ENOENT):
        return RunDirError(path, reason)
    return RunDirError(path, reason, f"{remedy or 'repair that'}, then go on with headrace up --resume RUN")


def machine_error(error: Exception) -> HeadraceError | None:
    """Return the error for what the machine refused, at the edge of a process; None for any other error.

    It may be memory, descriptors or a disk. A restart cures a lack of the first two, so their exit code is FAILURE.
    """
    number = getattr(error, "errno", None)  # of an OSError, or ZeroMQ's
    if isinstance(error, MemoryError) or (isinstance(error, ImportError | OSError) and _lacks_memory(str(error))):
        seen = str(error).strip().rpartition("\n")[2] or type(error).__name__
        advice = "raise its limit (ulimit -v), or give it less to do: fewer envs (sampling.num_envs), say"
        return HeadraceError(f"this process can get no more memory ({seen}); {advice}")
    if number in (errno.EMFILE, errno.ENFILE):
        return HeadraceError(f"this process can open no more files and sockets ({error}); {_REMEDIES[number]}")
    if isinstance(error, OSError) and (number in NO_ROOM or number in _REMEDIES):
        return write_error(str(error.filename or "the disk"), error, "a file of the run", "used")
    return None


def _lacks_memory(said: str) -> bool:
    """Return whether the dynamic loader or the kernel said that a limit leaves no memory, as for torch's libraries."""
    return "failed to map segment from shared object" in said or "cannot allocate memory" in said.lower()


def is_there(path: Path) -> bool:
    """Return whether there is a file or folder at `path`. Raises `RunDirError` where that cannot be seen.

    `Path.exists` raises `OSError` there, and from Python 3.14 on it answers no.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        absolute(path)
        return False
    except OSError as error:
        reason = error.strerror or str(error)
        sentence = f"{path} cannot be read: {reason}; {_REMEDIES.get(error.errno or 0, 'repair that, or name another')}"
        raise RunDirError(str(path), reason, sentence=sentence) from error
    return True


def absolute(path: str | Path) -> Path:
    """Return `path` from the root, as a program may change its working directory. Raises `RunDirError` without one."""
    try:
        return Path(path).absolute()
    except FileNotFoundError as error:
        told = f"{path} cannot be found: the working directory was removed; change to another one, or name it from /"
        raise RunDirError(str(path), "the working directory was removed", sentence=told) from error


@contextmanager
def reading(path: Path, what: str) -> Iterator[None]:
    """Turn the machine's `OSError` within the block into the `write_error` of `what` at `path`: the file may be whole.

    Leave the errors of a missing file, and of a pipe or a folder in its place.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _NO_FILE:
            raise
        raise write_error(str(path), error, what, "read") from error


@contextmanager
def writing(path: Path, what: str = "") -> Iterator[None]:
    """Turn an `OSError` within the block into the `write_error` of `what` at `path`."""
    try:
        yield
    except OSError as error:
        raise write_error(str(path), error, what) from error


class CheckpointError(HeadraceError):
    """The checkpoint at `path` is missing, torn, corrupt, or of another module. `advice` says what to do."""

    exit_code = ExitCode.RUN_DIR

    def __init__(self, path: str, reason: str, advice: str = "move it away to train from the start") -> None:
        self.path, self.reason = path, reason
        super().__init__(f"checkpoint {path} cannot be used: {reason}; {advice}")


class WindowStalledError(HeadraceError):
    """The learner holds `uncommitted` batches and waits for more, while every worker waits for a commit."""

    exit_code = ExitCode.WINDOW_STALLED

    def __init__(self, uncommitted: int, waited_s: float) -> None:
        self.uncommitted = uncommitted
        super().__init__(
            f"the stream holds {uncommitted} uncommitted batches and has waited {waited_s:g} s for another, while "
            "every worker waits for a commit; commit more often, or what you have once stream.starved is true, or "
            "raise worker.window_batches, broker.max_held_bytes and broker.max_held_batches"
        )
