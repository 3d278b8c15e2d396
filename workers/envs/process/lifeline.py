"""A process and all that it starts die with their parent, by whatever death.

The parent holds the writing end of a pipe and never writes. When it is gone the kernel closes that end and, because
the reading end was set up so (O_ASYNC, F_SETSIG), sends SIGKILL to the whole process group. Unlike PR_SET_PDEATHSIG
this reaches grandchildren too, and does not take the end of the thread that started a process for that of its parent.
It needs no thread and no lock of the interpreter, so a child that hangs in C dies as well.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal

_F_SETSIG = 10


def tie_group(lifeline: int, group: int) -> None:
    """Tie a process group to the reading end `lifeline`, which one of it holds; whoever else holds it may do so too.

    The parent does, for a process that was stopped as it started, and the process itself, should its parent be gone.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -group)
    fcntl.fcntl(lifeline, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    poll = select.poll()
    poll.register(lifeline, 0)
    if poll.poll(0):  # the parent was gone before the signal was set up
        os.killpg(group, signal.SIGKILL)
