"""Run a command that dies with its parent: `python parent_death.py PARENT_PID SIGNAL COMMAND ARGUMENTS...`.

The kernel sends SIGNAL to the process when the thread that started it ends, by whatever death (PR_SET_PDEATHSIG). The
setting survives exec, so this works for any program, Redis servers too. It is set here, in a program of its own between
fork and exec, and not in a `preexec_fn`, which may deadlock in a process that has threads.

Runs under `python -I -S`: nothing but the standard library's core may be imported here.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
CANNOT_RUN = 127


def main(arguments: list[str]) -> None:
    """Bind this process to its parent's life and become the command; does not return."""
    parent, death_signal, *command = arguments
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)
    if os.getppid() != int(parent):  # it died before the line above took effect
        sys.exit(CANNOT_RUN)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and what is ignored stays so over exec
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"error: {command[0]} cannot be run: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
