"""The supervisor's side of the fork server, which runs `fork_server_program.py`.

torch takes more than a second to import, in each process. The fork server imports it once, and each process of a fleet
begins as a copy of it, within milliseconds. The copies share the memory of what was imported.

A forked process is a child of the supervisor, like an executed one. The fork server forks twice, and the intermediate
process exits. The kernel then gives the grandchild to the nearest "subreaper" among its ancestors (prctl(2)). The
supervisor is a subreaper while it waits for the answer.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import BinaryIO

import orjson

from headrace.deploy.process.parent_death import bound_to_us
from headrace.schemas.basics.closable import Closable
from headrace.schemas.basics.stop_event import sigterm_blocked

log = logging.getLogger("headrace.supervisor")

HEADRACE = [sys.executable, "-m", "headrace.deploy"]
"""The first words of the commands that the fork server can run."""

READY = b"ready"
"""The first message of a fork server that can fork; any other says why it cannot."""

_PROGRAM = [sys.executable, "-m", "headrace.deploy.command.fork_server_program"]
_MOST_NEWS = 1000
_PR_SET_CHILD_SUBREAPER = 36
_ANSWER_S = 10.0
"""Seconds to wait for a fork. After it the process is executed instead."""


class ForkServer(Closable):
    """A process that has imported everything and forks processes of Headrace's commands. Use it in one thread.

    It blocks SIGTERM, which a service manager may send to all processes. A forked process handles SIGTERM as we do.

    - fd: readable when the fork server becomes ready or ends; then call `take_news`.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.is_ready = False
        self._environment = dict(environment)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.fd = self._socket.fileno()
        program = [*_PROGRAM, str(theirs.fileno()), str(os.getpid())]
        with theirs, sigterm_blocked(True):
            self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
                [*bound_to_us(), *program],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=self._environment,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )

    def end(self) -> None:
        """Kill the fork server without waiting for its end. Processes that it has forked live on."""
        self.is_ready = False
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """Kill the fork server and wait for its end. Processes that it has forked live on."""
        self.end()
        if self._process is not None:
            self._socket.close()
            self._process.wait()
            self._process = None

    @property
    def has_ended(self) -> bool:
        """Return whether the fork server has ended and can never fork again."""
        return self._process is None

    def forks_in(self, environment: Mapping[str, str]) -> bool:
        """Return whether the fork server can fork processes with this environment, unless it fails."""
        return dict(environment) == self._environment and not self.has_ended

    def take_news(self) -> None:
        """Note whether it is ready or has ended. Call it when `fd` is readable and before `fd` is closed."""
        if not self.has_ended:
            news = self._socket.recv(_MOST_NEWS)
            self.is_ready = news == READY
            if not self.is_ready:
                self._give_up(news.decode(errors="replace") or "has ended")

    def fork(
        self, argv: Sequence[str], environment: Mapping[str, str], added: Mapping[str, str], log_file: BinaryIO
    ) -> int | None:
        """Start `argv` in `environment` and `added`; return its pid, or None where it must be executed instead.

        The caller must execute `argv` if it is no command of Headrace, if `environment` differs from the fork server's
        (libraries read it while they are imported), or if the fork server has ended. The stdout and stderr of the
        process go to `log_file`. It is killed when this thread ends.
        """
        if not self.is_ready or list(argv[: len(HEADRACE)]) != HEADRACE or not self.forks_in(environment):
            return None
        arguments = argv[len(HEADRACE) :]
        request = orjson.dumps(
            {
                "arguments": arguments,
                "environment": added,
                "sigterm_blocked": signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ()),
            }
        )
        ours, theirs = socket.socketpair()
        with ours:
            _set_subreaper(True)
            try:
                with theirs:
                    socket.send_fds(self._socket, [request], [log_file.fileno(), theirs.fileno()])
                return self._answer(ours)
            except OSError as error:
                self._give_up(f"does not answer ({error.strerror or error})")
                return None
            finally:
                _set_subreaper(False)

    def _answer(self, channel: socket.socket) -> int | None:
        """Return the pid that the new process sends, and let it run. Without this answer the process ends."""
        readable, _, _ = select.select([channel], [], [], _ANSWER_S)
        told = channel.recv(16) if readable else b""
        if not told:
            self._give_up("has not forked")
            return None
        channel.send(b"go")
        return int(told)

    def _give_up(self, what: str) -> None:
        log.warning("the fork server %s; processes import torch themselves from now on, which takes seconds", what)
        self.close()


_early: list[ForkServer] = []


def start_early(environment: Mapping[str, str]) -> None:
    """Start a fork server for `early_or_new`. It imports torch while this process imports what it needs itself."""
    _early.append(ForkServer(environment))


def early_or_new(environment: Mapping[str, str]) -> ForkServer:
    """Return the fork server that was started early, if it can fork processes of `environment`; else a new one."""
    while _early:
        server = _early.pop()
        if server.forks_in(environment):
            return server
        server.close()
    return ForkServer(environment)


def _set_subreaper(on: bool) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)
