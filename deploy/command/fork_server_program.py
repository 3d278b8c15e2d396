"""The program of the fork server: `python -m headrace.deploy.command.fork_server_program SOCKET SUPERVISOR_PID`.

It imports what the processes of a fleet need, and nothing of the user's. Then it forks one process for each request
that comes by the socket. The process runs a command of Headrace, as `python -m headrace.deploy` would.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import sys
import time
import weakref
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import orjson

from headrace.deploy.command.entry import run_to_end
from headrace.deploy.process.fork_server import HEADRACE, READY
from headrace.deploy.process.parent_death import CANNOT_RUN, PR_SET_PDEATHSIG
from headrace.deploy.run.annexes import part

_ADOPTION_S = 5.0
"""Seconds until a new process must have become the supervisor's child."""
_MOST_REQUEST = 1 << 16
_MOST_REASON = 500


def main(arguments: list[str]) -> None:
    """Serve forks until the supervisor has gone. Returns in each forked process, with its command in `sys.argv`."""
    requests, supervisor = socket.socket(fileno=int(arguments[0])), int(arguments[1])
    gc.disable()  # garbage collection of lasting objects takes a seventh of the import time
    try:
        _import_all()
    except Exception as error:  # noqa: BLE001 - after any error, the supervisor executes its processes instead
        _refuse(requests, f"could not import what a fleet needs ({type(error).__name__}: {error})")
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1:
        _refuse(requests, f"had {threads} threads after its imports, and a fork would have one")
    _leave_out_finalizers()
    gc.enable()
    gc.freeze()  # so that no copy's collector writes to the shared memory; collecting before takes 0.2 s and frees 1 MB
    requests.send(READY)
    request, (log_file, channel) = _serve(requests)
    _begin(orjson.loads(request), supervisor, log_file, socket.socket(fileno=channel))


def _import_all() -> None:
    import gymnasium  # noqa: F401
    import setproctitle  # noqa: F401
    import torch  # noqa: F401

    from headrace.workers.annex_parts import part as part_of_workers

    part("check_start")
    part("run_learner")
    part_of_workers("limited_construction")
    import headrace.broker.process
    import headrace.deploy.command.cli
    import headrace.deploy.fleet.check_process
    import headrace.deploy.fleet.checkpoint_copy
    import headrace.deploy.fleet.roles
    import headrace.workers.fleet.memory
    import headrace.workers.fleet.worker

    headrace.deploy.command.cli.command_line()


def _leave_out_finalizers() -> None:
    """Disable the finalizers of imported modules at exit in all processes: they only free memory, and take 50 ms."""
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False


def _refuse(requests: socket.socket, why: str) -> NoReturn:
    requests.send(why.encode()[:_MOST_REASON])
    sys.exit(1)


def _serve(requests: socket.socket) -> tuple[bytes, list[int]]:
    """Fork for each request. Return, in the forked process, the request and its descriptors."""
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, _MOST_REQUEST, 2)
        if not request:
            sys.exit(0)
        between = os.fork()
        if between == 0:
            if _forks():
                os._exit(0)
            requests.close()
            return request, descriptors
        for descriptor in descriptors:
            os.close(descriptor)
        os.waitpid(between, 0)


def _forks() -> bool:
    """Fork. Return True in the old process, even if it could not."""
    try:
        return os.fork() > 0
    except OSError:
        return True


def _begin(request: dict[str, Any], supervisor: int, log_file: int, channel: socket.socket) -> None:
    """Make this copy a process of its own: session, output, death signal, environment, command line, random state."""
    from headrace.workers.randomness.seeds import draw_global_seeds

    os.setsid()
    deadline = time.monotonic() + _ADOPTION_S
    while os.getppid() != supervisor and time.monotonic() < deadline:
        time.sleep(0.0005)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != supervisor:  # the supervisor died before the line above took effect
        os._exit(CANNOT_RUN)
    with channel:
        channel.send(str(os.getpid()).encode())
        if not channel.recv(2):  # the supervisor has executed the command meanwhile
            os._exit(CANNOT_RUN)
    if not request["sigterm_blocked"]:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    for stream in (1, 2):
        os.dup2(log_file, stream)
    os.close(log_file)
    os.environ.update(request["environment"])
    draw_global_seeds()
    sys.argv = [str(Path(__file__).parents[1] / "__main__.py"), *request["arguments"]]
    sys.modules["__main__"].__spec__ = find_spec("headrace.deploy.__main__")  # peers are told this name
    _show_command_line([*HEADRACE, *request["arguments"]])


def _show_command_line(words: list[str]) -> None:
    """Set the command line that `ps` and `top` show. Otherwise all copies show the fork server's."""
    from setproctitle import setproctitle

    setproctitle(" ".join(words))


if __name__ == "__main__":
    main(sys.argv[1:])
    from headrace.deploy.command.cli import main as run_command

    status = run_to_end(run_command)
    os._exit(status if isinstance(status, int) else int(status is not None))  # the log may be on a full disk
