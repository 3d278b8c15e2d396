"""A process and all that it starts die with their parent, however the parent dies.

The parent holds the writing end of a pipe and never writes. When the parent dies, the kernel closes that end. The
reading end is set up (O_ASYNC, F_SETSIG) so that the kernel then sends SIGKILL to the whole process group. Unlike
PR_SET_PDEATHSIG, this reaches grandchildren, and the end of the thread that started a process has no effect. It needs
no thread and no interpreter lock, so a child that hangs in C dies too.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal

_F_SETSIG = 10


def tie_group(lifeline: int, group: int) -> None:
    """Tie a process group to `lifeline`, the reading end of the pipe, which a process of the group holds.

    The parent calls it, in case the process is stopped as it starts. The process calls it too, in case its parent is
    gone.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -group)
    fcntl.fcntl(lifeline, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    poll = select.poll()
    poll.register(lifeline, 0)
    if poll.poll(0):  # the parent was gone before the signal was set up
        os.killpg(group, signal.SIGKILL)
