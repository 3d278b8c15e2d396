"""One started process: its pidfd, its log and its end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from headrace.deploy.process.child_environment import EXIT_RECORD, LIVENESS_FILE
from headrace.deploy.process.exit_record import ExitRecord, take_exit_record
from headrace.deploy.process.fork_server import ForkServer
from headrace.deploy.process.parent_death import bound_to_us
from headrace.deploy.terminal.log_rotation import rotated_path, was_rotated_since
from headrace.schemas.basics.run_files import opener
from headrace.schemas.basics.stop_event import signal_name
from headrace.schemas.errors import ExitCode, writing

_TAIL_BYTES = 16 * 1024
LEFT = "left behind: "
"""Prefix of the line that names the threads or processes for which the end of a process would have waited."""
_SENTENCE = 1000


class Child:
    """A process in a session of its own, so that Ctrl-C in a terminal reaches only the supervisor.

    It dies with the thread that started it. Signals go through its pidfd and so can never reach
    another process that was given the same pid. stdout and stderr are appended to `log_path`; stdin is empty.

    `fork_server` forks it where it can; otherwise it is executed.
    """

    def __init__(
        self,
        argv: Sequence[str],
        log_path: Path,
        *,
        incarnation: int = 1,
        env: Mapping[str, str] | None = None,
        fork_server: ForkServer | None = None,
    ) -> None:
        self.log_path = log_path
        self.incarnation = incarnation
        self._exit_record_path = log_path.with_name(f".{log_path.stem}-{incarnation}.end")
        self.liveness_path = log_path.with_name(f".{log_path.stem}-{incarnation}.alive")
        """The file that the process touches while it lives, if its role does so."""
        self.exit_record: ExitRecord | None = None
        """The exit record, once the process was reaped. None when the process did not announce this end itself."""
        environment = os.environ if env is None else env
        with _open(log_path) as log:
            self._log_start = log.tell()
            forked = fork_server and fork_server.fork(argv, environment, self._places(), log)
            self._process = None if forked else self._execute([*bound_to_us(), *argv], environment, log)
        self.pid = self._process.pid if self._process is not None else forked or 0
        try:
            self.pidfd = os.pidfd_open(self.pid)
        except OSError:  # no descriptor is left: nothing could watch the process, or restart it
            os.kill(self.pid, signal.SIGKILL)
            self._wait()
            raise
        self.started_unix = time.time()
        self.started = time.monotonic()

    def _execute(self, command: list[str], environment: Mapping[str, str], log: BinaryIO) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**environment, **self._places()},
            start_new_session=True,
        )

    def _places(self) -> dict[str, str]:
        return {EXIT_RECORD: str(self._exit_record_path.absolute()), LIVENESS_FILE: str(self.liveness_path.absolute())}

    def send(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens when the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            if self.pidfd >= 0:
                signal.pidfd_send_signal(self.pidfd, number)

    def reap(self) -> int:
        """Return the return code (negative: the signal that killed it).

        Call it once `pidfd` is readable, else it blocks.

        Kills all processes left in the process group, such as a user's simulator that this process had started.
        """
        os.waitid(
            os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT
        )  # not reaped yet, so the pid cannot belong to another process group
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        returncode = self._wait()
        os.close(self.pidfd)
        self.pidfd = -1
        with contextlib.suppress(OSError):
            self.liveness_path.unlink()
        record = take_exit_record(self._exit_record_path, self.pid)
        self.exit_record = record if record is not None and record.exit_code == returncode else None
        return returncode

    def _wait(self) -> int:
        if self._process is not None:
            return self._process.wait()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def log_lines(self, count: int) -> list[str]:
        """Return the last lines that this very process wrote, at most `count`, without blank ones."""
        if was_rotated_since(self.log_path, self.started_unix):
            text = _tail(rotated_path(self.log_path), 0) + _tail(self.log_path, 0)
        else:
            text = _tail(self.log_path, self._log_start)
        lines = text[-_TAIL_BYTES:].decode(errors="replace").splitlines()
        return [line for line in lines if line.strip()][-count:]

    def last_error(self) -> str | None:
        """Return the sentence after `error: ` with which our commands end, on one line; None when there is none."""
        lines = [line for line in self.log_lines(200) if not line.startswith(LEFT)]
        starts = [number for number, line in enumerate(lines) if line.startswith("error: ")]
        if not starts:
            return None
        return " ".join(" ".join(lines[starts[-1] :]).removeprefix("error: ").split())[:_SENTENCE]


def last_line(path: Path) -> str:
    """Return the last line in a log that is not blank; "" if there is none."""
    lines = _tail(path, 0).decode(errors="replace").splitlines()
    return next((line for line in reversed(lines) if line.strip()), "")


def _tail(path: Path, start: int) -> bytes:
    """Return the end of the file, from `start` on at most; b"" if there is no file that can be read."""
    try:
        with path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(start, size - _TAIL_BYTES))
            return log.read(_TAIL_BYTES)
    except OSError:  # the run directory was removed, or its disk is broken
        return b""


def _open(log_path: Path) -> BinaryIO:
    with writing(log_path.parent):
        return open(log_path, "ab", opener=opener)


def describe_end(returncode: int) -> str:
    """Return a return code in words: "signal SIGKILL", "exit code 4 (ENV)"."""
    if returncode < 0:
        return f"signal {signal_name(-returncode)}"
    names = [code.name for code in ExitCode if code == returncode]
    return f"exit code {returncode} ({names[0]})" if names else f"exit code {returncode}"
