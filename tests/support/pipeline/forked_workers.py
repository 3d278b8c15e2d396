"""Workers in processes that begin as copies of one with everything imported, as those of a fleet do.

To import torch takes each process seconds of CPU time. `deploy/process/fork_server.py` cannot serve here: it runs
commands of Headrace, and the tests give a worker its place and its recorder's folder by themselves.

    python -m support.pipeline.forked_workers SOCKET

is the server: each message on the socket is one worker to fork.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import orjson

from headrace.deploy.process.child_environment import child_environment

_MOST_REQUEST = 1 << 17


class ForkedWorker:
    """A worker's process, with the methods of `subprocess.Popen` that the tests use."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        told = channel.recv(32)
        assert told, "the process that forks workers has ended; see its stderr"
        self.pid = int(told)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the return code, or None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout_s: float) -> int:
        """Return the return code. Raises `subprocess.TimeoutExpired`."""
        if self.returncode is None:
            if not select.select([self._channel], [], [], timeout_s)[0]:
                raise subprocess.TimeoutExpired("a forked worker", timeout_s)
            self.returncode = int(self._channel.recv(32))
            self._channel.close()  # the pid was this worker's until now
        return self.returncode

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


class WorkerForks:
    """The server, as the tests see it."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            program = [sys.executable, "-m", __name__, str(theirs.fileno())]
            self._process = subprocess.Popen(
                program, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=child_environment(1)
            )

    def start(self, arguments: list[str], log: BinaryIO) -> ForkedWorker:
        """Start `run(*arguments)` in today's environment and folder; its output goes to `log`."""
        environment = {**child_environment(1), **os.environ}
        request = {"arguments": arguments, "environment": environment, "folder": str(Path.cwd())}
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(self._socket, [orjson.dumps(request)], [theirs.fileno(), log.fileno()])
        return ForkedWorker(ours)

    def close(self) -> None:
        """End the server. Its workers live on, which the tests that started them end."""
        self._socket.close()
        self._process.kill()
        self._process.wait()


def run(run_dir: str, config: str, endpoint: str, slot: str, incarnation: str) -> None:
    """Be a worker until SIGTERM; its recorder stands in `run_dir`."""
    import logging

    from headrace.schemas.errors import HeadraceError
    from headrace.schemas.settings.config_loading import build_config
    from headrace.workers.fleet.worker import run_worker

    logging.basicConfig()
    place = {"endpoint": endpoint, "fleet_id": "fleet", "slot": int(slot), "incarnation": int(incarnation)}
    try:
        run_worker(build_config(orjson.loads(config)), recorder_dir=Path(run_dir), **place)
    except HeadraceError as error:
        sys.stderr.write(f"{type(error).__name__} {error}\n")
        sys.exit(error.exit_code)


def _serve(requests: socket.socket) -> None:
    """Fork for each request, until nobody can send one. Returns in each worker once its work is done."""
    import gymnasium  # noqa: F401
    import torch  # noqa: F401

    import headrace.workers.fleet.worker  # noqa: F401

    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a fork would have one of several threads"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that watch over workers
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, _MOST_REQUEST, 2)
        if not request:
            return
        if os.fork() == 0:
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _begin(orjson.loads(request), socket.socket(fileno=descriptors[0]), descriptors[1])
            return
        for descriptor in descriptors:
            os.close(descriptor)


def _begin(request: dict[str, object], channel: socket.socket, log: int) -> None:
    """Fork the worker, and run it there. The other process watches over it, and does not return."""
    watched = os.fork()
    if watched:
        channel.send(str(watched).encode())
        ended = os.waitid(os.P_PID, watched, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        with suppress(OSError):
            channel.send(str(code).encode())
            channel.recv(1)  # until the test has heard of it, no other process may get this pid
        os._exit(0)
    channel.close()
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    os.environ.clear()
    os.environ.update(request["environment"])  # type: ignore[call-overload]
    os.chdir(str(request["folder"]))
    run(*request["arguments"])  # type: ignore[misc]


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
