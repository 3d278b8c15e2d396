"""The run directory: the files of one fleet, and the lock that keeps a second fleet out.

DIR/fleet.json       the processes (`fleet_file.py`); 0600, since the Redis URL has a password
DIR/settings.json    the configuration that the user asked for, which `--resume` reads; 0600 too
DIR/.*.seal          the seals of config.json and settings.json (`seal.py`)
DIR/config.json      the resolved configuration that the children read; 0600, for the same reason
DIR/broker.json      the broker's own: its endpoints, and its state for a restart
DIR/books.json       the books of ended lives of workers, for an empty Redis (`books_file.py`)
DIR/lifetime.json    counters of runners, logged sums and env failures, for an empty Redis too; a sum of ended lives, by
                     which the audit sees that the books were lost (`lifetime_file.py`)
DIR/report.json      what Redis should hold, while it is away (`report_file.py`)
DIR/tasks.json       the newest tasks that a teacher published, for a restart of the broker
DIR/ipc/             the Unix sockets of broker and workers, if they have any (`schemas/peers/socket_folder.py`); 0700
DIR/keys/            the keys that `headrace up --listen` makes (`schemas/credentials/keys.py`); 0700
DIR/lock             held while a supervisor lives
DIR/logs/            one file a process name, lives appended
DIR/recorders/       worker-SLOT-INCARNATION.rec, each until Redis has the final books of that life and a learner has
                     taken its end
DIR/rendezvous.json  where the broker publishes its addresses (`schemas/peers/rendezvous.py`)
DIR/workers.json     the number of workers that `headrace scale` asked for (`scale.py`)
DIR/metrics.jsonl    the run's logged rows, one a line (`run_rows.py`); further runs in the directory append
DIR/health/          a file for each process, for `headrace health` (`health.py`)
DIR/summary.json     facts about the run and its end, for reports (`summary.py`); 0600
DIR/redis/           the embedded server's data
DIR/learner.checkpoint    the learner's newest checkpoint, DIR/best.checkpoint the best one so far
DIR/failures/        the newest failures of envs, for `headrace rerun` (`workers/reruns/failure_files.py`)
DIR/evaluations.jsonl     the evaluations of checkpoints, a line each (`evaluation_log.py`)
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import time
from pathlib import Path
from types import TracebackType

from headrace.deploy.process.fleet_errors import FleetError
from headrace.schemas.basics.run_files import open_own, replace_private
from headrace.schemas.errors import ExitCode, RunDirError, is_there, writing

RUNS = Path("runs")
"""Folder for runs that are given no directory."""
KEYS_FOLDER = "keys"
"""Folder in a run directory, for the keys that Headrace makes."""
_LONGEST_NAME = 60
_ROOT = 0


def new_run_dir(env: str) -> Path:
    """Return the path of a new run of `env`: runs/ENV-TIME. The directory is not made."""
    first = RUNS / f"{file_name_of(env)}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = first, 1
    while path.exists():
        number += 1
        path = first.with_name(f"{first.name}-{number}")
    return path


def file_name_of(name: str) -> str:
    """Return `name` with only letters, digits, "_", "." and "-", so that it can be part of a file's name."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.")[:_LONGEST_NAME] or "run"


def newest_run() -> Path:
    """Return the run in `runs/` that was started last. Raises `FleetError` when there is none."""
    runs = [(started, path) for path in RUNS.glob("*") if (started := _started_ns(path)) is not None]
    if not runs:
        problem = f"there is no run in {RUNS.absolute()}; name one with --run-dir, or start one: headrace up"
        raise FleetError(problem, ExitCode.RUN_DIR)
    return max(runs)[1]


def _started_ns(run: Path) -> int | None:
    """Return when `up`, or else a broker alone, was last started in `run`; None for a folder without a run."""
    for name in ("config.json", "broker.json"):
        try:
            return (run / name).stat().st_mtime_ns
        except OSError:
            continue
    return None


class RunDir:
    """A directory that only this process uses, within `with`. Raises `RunDirError` when it cannot be used."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.fleet_json = self.path / "fleet.json"
        self.config_json = self.path / "config.json"
        self.settings_json = self.path / "settings.json"
        self.broker_json = self.path / "broker.json"
        self.logs = self.path / "logs"
        self.recorders = self.path / "recorders"
        self._lock: int | None = None
        self._is_new = not is_there(self.path)

    def __enter__(self) -> RunDir:
        with writing(self.path):
            self._check_owner()
            self.logs.mkdir(parents=True, exist_ok=True)
            self.recorders.mkdir(exist_ok=True)
            self._lock = open_own(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            self._take_lock(self._lock)
        return self

    def _check_owner(self) -> None:
        """Raise `RunDirError` if other users could replace every file in the directory: its owner, or all users."""
        if self._is_new:
            return
        status, own = self.path.stat(), os.geteuid()
        owner = status.st_uid
        if owner not in (own, _ROOT):
            reason = f"it belongs to user {owner}, and this is user {own}"
            raise RunDirError(str(self.path), reason, f"name a new folder with --run-dir, or chown it to user {own}")
        if owner == own != _ROOT and status.st_mode & stat.S_IWOTH:  # that of root may be the volume of a container
            reason = "every user of this machine may write in it"
            raise RunDirError(str(self.path), reason, f"run: chmod o-w {self.path}")

    def _take_lock(self, lock: int) -> None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(lock, 32).decode(errors="replace") or "unknown"
            raise RunDirError(str(self.path), f"another fleet runs in it (supervisor pid {holder})") from None
        os.truncate(lock, 0)
        os.write(lock, str(os.getpid()).encode())

    def remove_unless_used(self) -> None:
        """Remove the directory if this object has made it and nothing has started in it."""
        if self._is_new and not is_there(self.settings_json):
            shutil.rmtree(self.path, ignore_errors=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        if error is not None:
            self.remove_unless_used()


def is_locked(run_dir: Path) -> bool:
    """Return whether a supervisor lives in the directory."""
    try:
        lock = open_own(run_dir / "lock", os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def write_private(path: Path, content: bytes) -> None:
    """Replace the file at `path` in one step, readable by its owner alone. Raises `RunDirError`."""
    with writing(path):
        replace_private(path, content)
