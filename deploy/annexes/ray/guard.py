"""A program that runs a command until a socket closes: `guard.py SOCKET_FD GRACE_S COMMAND ARGUMENTS...`.

The command gets SIGTERM when the other end of the socket closes, for any reason, and SIGKILL `GRACE_S` later. So a
worker also drains if its actor was killed. When the command has ended, this program writes its pid and return code
to the socket, as "PID CODE" and a line end.

Ray kills the children of an actor's process when that process ends. So this program forks, and the parent, which is the
child that Ray knows, exits immediately.

Runs under `python -I -S`: only the standard library's core may be imported here.
"""

import os
import select
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

_PARENT_DEATH = str(Path(__file__).resolve().parents[2] / "process" / "parent_death.py")


def main(arguments: list[str]) -> None:
    """Leave the caller's children, run the command to its end, and report how it ended."""
    number, grace_s, *command = arguments
    if os.fork():
        os._exit(0)
    os.setsid()
    with socket.socket(fileno=int(number)) as line:
        os.set_inheritable(line.fileno(), False)
        process = _start(command)
        returncode = _await_end(process, line, float(grace_s))
        with suppress(OSError):
            line.sendall(b"%d %d\n" % (process.pid, returncode))


def _start(command: list[str]) -> "subprocess.Popen[bytes]":
    """Start the command in a process group of its own. It is killed if this program is."""
    bound = [sys.executable, "-I", "-S", _PARENT_DEATH, str(os.getpid())]
    return subprocess.Popen([*bound, *command], stdin=subprocess.DEVNULL, start_new_session=True)


def _await_end(process: "subprocess.Popen[bytes]", line: socket.socket, grace_s: float) -> int:
    """Return the return code of the process. Kill the rest of its process group."""
    ended = os.pidfd_open(process.pid)
    if ended not in select.select([ended, line.fileno()], [], [])[0]:
        process.send_signal(signal.SIGTERM)
        select.select([ended], [], [], grace_s)
    with suppress(ProcessLookupError):  # not reaped yet, so the pid cannot belong to another process group
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


if __name__ == "__main__":
    main(sys.argv[1:])
