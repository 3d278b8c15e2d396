"""A process of envs: `python -m headrace.workers.envs.process.child DESCRIPTOR`.

The descriptor is of a `ProcessJob` as JSON. Envs of several agents are packed, so that a driver steps them like others.

A driver starts it, with stdin empty and stdout and stderr drained. The process obeys the driver's orders, and ends on
the order STOP or when its driver dies.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # scanning objects that stay takes a fifth of the import time

import faulthandler
import itertools
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import NoReturn

from headrace.workers.annex_parts import part
from headrace.workers.envs.process.channel import ProcessEnd, tie_group
from headrace.workers.envs.process.control import Control
from headrace.workers.envs.process.process_envs import BuildEnv, ProcessEnvs, ProcessJob, build_solo_env

STACK_SIGNAL = signal.SIGRTMAX
"""Asks for the Python stack of all threads. Envs and their libraries are unlikely to use this signal."""

_RSS_EVERY_S = 0.05


def main() -> NoReturn:
    """Serve the job that the command line names until the driver stops it, then end the process."""
    with os.fdopen(int(sys.argv[1]), "rb") as file:
        job = ProcessJob.model_validate_json(file.read())
    build_env = build_solo_env if job.several_agents is False else part("build_any_env")
    gc.freeze()
    gc.enable()
    serve(job, build_env)
    # Do not wait for threads that an env has left behind, or for one that hangs in close().
    sys.stdout.flush()
    os._exit(0)


def serve(job: ProcessJob, build_env: BuildEnv) -> None:
    """Serve the job until the driver stops it."""
    tie_group(job.lifeline, os.getpgid(0))
    for descriptor in job.descriptors:
        os.set_inheritable(descriptor, False)  # an env's own child processes must not inherit them
    faulthandler.enable(job.last_words)
    faulthandler.register(STACK_SIGNAL, job.last_words)
    sys.path[:] = job.import_path
    control = Control(job.control, job.lanes, create=False)
    control.end_copies()
    host = ProcessEnvs(job, control, build_env)
    channel = ProcessEnd(socket.socket(fileno=job.socket), job.bell, job.told, (job.latch_tokens, job.latch_bell))
    memory = _Memory(control)
    control.rest()  # the driver had set the note START
    slots = itertools.cycle(control.slots)
    while posted := channel.wait():
        for slot in itertools.islice(slots, posted):
            host.obey(slot, channel)
            memory.note()
            channel.reply()
    host.close()


class _Memory:
    """Notes the process's memory use from time to time."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._page = os.sysconf("SC_PAGE_SIZE")
        self._next = 0.0

    def note(self) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._control.rss_bytes = int(Path("/proc/self/statm").read_text().split()[1]) * self._page
            self._next = now + _RSS_EVERY_S


if __name__ == "__main__":
    main()
