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

_STATM, _RSS_EVERY_S = Path("/proc/self/statm"), 0.05


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
    channel = ProcessEnd(job.bell, job.told, job.replies, (job.latch_tokens, job.latch_bell))
    page, note_at = os.sysconf("SC_PAGE_SIZE"), 0.0
    control.rest()  # the driver had set the note START
    slots = itertools.cycle(control.slots)
    while posted := channel.wait():
        for slot in itertools.islice(slots, posted):
            host.obey(slot, channel)
            if (now := time.monotonic()) >= note_at:
                control.rss_bytes, note_at = int(_STATM.read_text().split()[1]) * page, now + _RSS_EVERY_S
            channel.reply()
    host.close()


if __name__ == "__main__":
    main()
