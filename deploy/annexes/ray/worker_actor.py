"""The actor, which starts one `headrace worker` on its node. The worker drains when the actor ends.

Ray notices only after many seconds, and sometimes not at all, that the raylet of an actor's node has died: the actor's
process goes on, and Ray starts the actor on another node. So the actor watches its raylet and ends with it.
"""

from __future__ import annotations

import os
import select
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

from headrace.deploy.process.child import last_line
from headrace.deploy.process.child_environment import EXIT_RECORD, child_environment
from headrace.deploy.process.exit_record import take_exit_record
from headrace.deploy.process.fork_server import HEADRACE
from headrace.schemas.basics.run_files import opener, replace_private
from headrace.schemas.errors import RunDirError

_GUARD = Path(__file__).with_name("guard.py")
RAYLET_DIED = GUARD_DIED = 1


@dataclass(frozen=True)
class WorkerStart:
    """Everything that an actor needs to start its worker.

    - settings: the fleet's configuration as JSON, without what a worker does not need.
    - threads: of torch and BLAS.
    - arguments: the arguments of `headrace worker` after the configuration.
    - grace_s: seconds that the worker has to drain before it is killed.
    """

    settings: bytes
    fleet_id: str
    threads: int
    arguments: tuple[str, ...]
    grace_s: float


@dataclass(frozen=True)
class WorkerEnd:
    """The end of a worker, and what it said."""

    returncode: int
    sentence: str = ""
    announced: bool = False
    """True if the worker ended on purpose, so that its exit code is one of Headrace's."""


class WorkerActor:
    """Runs one `headrace worker` at a time. Ray calls `run` and `stop` in threads of their own."""

    def __init__(self, name: str, start: WorkerStart) -> None:
        self._start = start
        self._folder = node_folder(start.fleet_id)
        self._config = self._folder / f"{name}.json"
        self._log = self._folder / "logs" / f"{name}.log"
        self._record = self._folder / "logs" / f".{name}.end"
        self._lock = threading.Lock()
        self._line: socket.socket | None = None
        self._stopping = False
        threading.Thread(target=_end_with, args=(os.pidfd_open(os.getppid()),), daemon=True).start()

    def where(self) -> tuple[str, int]:
        """Return the host's name and the actor's pid."""
        return socket.gethostname(), os.getpid()

    def run(self) -> WorkerEnd:
        """Run a worker, and return how it ended. Blocks for as long as it lives."""
        with self._lock:
            if self._stopping:
                return WorkerEnd(0)
            line = self._line = self._open()
        with line, line.makefile() as words:
            told = words.readline().split()
        with self._lock:
            self._line = None
        return self._end(*map(int, told)) if told else WorkerEnd(GUARD_DIED, "its guard was killed")

    def stop(self) -> None:
        """Tell the worker to drain and to end. `run` returns then, and no further worker starts."""
        with self._lock:
            self._stopping = True
            if self._line is not None:
                self._line.shutdown(socket.SHUT_WR)

    def _open(self) -> socket.socket:
        """Start the guard and the worker. Return the line to the guard."""
        replace_private(self._config, self._start.settings)
        line, far_end = socket.socketpair()
        command = [*HEADRACE, "worker", "--config", str(self._config)]
        command += [*self._start.arguments, "--run-dir", str(self._folder), "--count", "1"]
        guard = [sys.executable, "-I", "-S", str(_GUARD), str(far_end.fileno()), f"{self._start.grace_s:g}"]
        with far_end, open(self._log, "ab", opener=opener) as log:
            subprocess.run(
                [*guard, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**child_environment(self._start.threads), EXIT_RECORD: str(self._record)},
                pass_fds=(far_end.fileno(),),
                check=True,
            )
        return line

    def _end(self, pid: int, returncode: int) -> WorkerEnd:
        record = take_exit_record(self._record, pid)
        if record is not None and record.exit_code == returncode:
            return WorkerEnd(returncode, record.sentence, announced=True)
        return WorkerEnd(returncode, last_line(self._log))


def node_folder(fleet_id: str) -> Path:
    """Return the folder of this user's workers of a fleet on this node, and make it: recorders, logs and settings.

    Raises `RunDirError` if it belongs to another user, or other users can access it.
    """
    folder = Path(tempfile.gettempdir()) / f"headrace-{os.getuid()}" / fleet_id
    for path in (folder.parent, folder, folder / "logs"):
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise RunDirError(str(path), "it is not for this user alone", "remove it, or set TMPDIR on this node")
    return folder


def _end_with(pidfd: int) -> None:
    """End this process when the process of `pidfd` ends. The guard notices, and drains the worker."""
    select.select([pidfd], [], [])
    os._exit(RAYLET_DIED)
