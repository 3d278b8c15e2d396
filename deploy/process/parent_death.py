"""A program that runs a command and dies with its parent: `parent_death.py PARENT_PID COMMAND ARGUMENTS...`.

The kernel sends SIGKILL to the process when the thread that started it ends, however it ends (PR_SET_PDEATHSIG). The
setting survives exec, so this works for any program, Redis servers too. This program sets it between fork and exec.
A `preexec_fn` could deadlock in a process that has threads.

Runs under `python -I -S`: only the standard library's core may be imported here.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
CANNOT_RUN = 127


def bound_to_us() -> list[str]:
    """Return the argv prefix that makes a command's process die with this thread."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid())]


def main(arguments: list[str]) -> None:
    """Bind this process to its parent's life and become the command. Does not return."""
    parent, *command = arguments
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):  # the parent died before the line above took effect
        sys.exit(CANNOT_RUN)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and an ignored signal stays ignored over exec
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"error: {command[0]} cannot be run: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
