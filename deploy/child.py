"""One started process: its pidfd, its log and its end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from headrace.deploy import parent_death
from headrace.deploy.exit_record import VARIABLE, ExitRecord, take_exit_record
from headrace.deploy.liveness_file import VARIABLE as LIVENESS_VARIABLE
from headrace.schemas.errors import ExitCode, RunDirError
from headrace.schemas.signal_names import signal_name

_TAIL_BYTES = 16 * 1024
_SENTENCE = 1000


class Child:
    """A process in a session of its own, so that Ctrl-C in a terminal reaches only the supervisor.

    It dies with the thread that started it (`death_signal`). Signals go through its pidfd and so can never reach
    another process that was given the same pid. stdout and stderr are appended to `log_path`; stdin is empty.
    """

    def __init__(
        self,
        argv: Sequence[str],
        log_path: Path,
        *,
        incarnation: int = 1,
        env: Mapping[str, str] | None = None,
        death_signal: signal.Signals = signal.SIGKILL,
    ) -> None:
        self.log_path = log_path
        self.incarnation = incarnation
        self._exit_record_path = log_path.with_name(f".{log_path.stem}-{incarnation}.end")
        self.liveness_path = log_path.with_name(f".{log_path.stem}-{incarnation}.alive")
        """The file that the process touches while it lives, if its role does so."""
        self.exit_record: ExitRecord | None = None
        """The exit record, once the process was reaped. None when the process did not announce this end itself."""
        launcher = [sys.executable, "-I", "-S", parent_death.__file__, str(os.getpid()), str(int(death_signal))]
        with _open(log_path) as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                [*launcher, *argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**(os.environ if env is None else env), **self._places()},
                start_new_session=True,
            )
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)
        self.started_unix = time.time()
        self.started = time.monotonic()

    def _places(self) -> dict[str, str]:
        return {VARIABLE: str(self._exit_record_path.absolute()), LIVENESS_VARIABLE: str(self.liveness_path.absolute())}

    def send(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens when the process has ended."""
        if self.pidfd < 0:
            return
        try:
            signal.pidfd_send_signal(self.pidfd, number)
        except ProcessLookupError:
            return

    def reap(self) -> int:
        """Return the return code (negative: the signal that killed it).

        Call it once `pidfd` is readable, else it blocks.

        Kills all processes left in the process group, such as a user's simulator that this process had started.
        """
        os.waitid(
            os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT
        )  # not reaped yet, so the group is surely still its own
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        returncode = self._process.wait()
        os.close(self.pidfd)
        self.pidfd = -1
        self.liveness_path.unlink(missing_ok=True)
        record = take_exit_record(self._exit_record_path, self.pid)
        self.exit_record = record if record is not None and record.exit_code == returncode else None
        return returncode

    def log_lines(self, count: int) -> list[str]:
        """Return the last lines that this very process wrote, at most `count`, without blank ones."""
        try:
            with self.log_path.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, size - _TAIL_BYTES))
                lines = log.read().decode(errors="replace").splitlines()
                return [line for line in lines if line.strip()][-count:]
        except FileNotFoundError:  # the run directory was removed
            return []

    def last_error(self) -> str | None:
        """Return the sentence after `error: ` with which our commands end, on one line; None when there is none."""
        lines = self.log_lines(200)
        starts = [number for number, line in enumerate(lines) if line.startswith("error: ")]
        if not starts:
            return None
        return " ".join(" ".join(lines[starts[-1] :]).removeprefix("error: ").split())[:_SENTENCE]


def _open(log_path: Path) -> BinaryIO:
    try:
        return log_path.open("ab")
    except OSError as error:
        raise RunDirError(str(log_path.parent), error.strerror or str(error)) from error


def describe_end(returncode: int) -> str:
    """Return a return code in words: "signal SIGKILL", "exit code 4 (ENV)"."""
    if returncode < 0:
        return f"signal {signal_name(-returncode)}"
    names = [code.name for code in ExitCode if code == returncode]
    return f"exit code {returncode} ({names[0]})" if names else f"exit code {returncode}"
