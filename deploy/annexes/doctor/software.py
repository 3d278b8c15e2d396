"""Checks of the software: Python, packages and kernel, and the threads of torch."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator

from headrace.deploy.annexes.doctor.check import Check, Verdict
from headrace.schemas.basics.process_usage import crowded_cores, own_cores, torch_threads


def software_checks() -> Iterator[Check]:
    """Check everything that is installed."""
    yield Check("python", Verdict.OK, f"{sys.version.split()[0]} at {sys.executable}")  # pip refuses an older one
    for name in ("torch", "gymnasium", "numpy", "zmq", "redis"):
        yield _package(name)
    yield _pidfd()


def _package(name: str) -> Check:
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        return Check(name, Verdict.FAIL, str(error), "install Headrace again: pip install headrace")
    return Check(name, Verdict.OK, str(getattr(module, "__version__", "installed")))


def _pidfd() -> Check:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError) as error:
        return Check("pidfd", Verdict.FAIL, str(error), "the supervisor needs Linux 5.3 or newer")
    return Check("pidfd", Verdict.OK, os.uname().release)


def own_learner_check(workers: int) -> Check:
    """Say if a learner of one's own would take the cores of these workers, started here with torch's default."""
    threads, cores = torch_threads(), own_cores()  # `software_checks` has loaded torch
    if crowded := crowded_cores(threads, cores, workers):
        return Check("learner", Verdict.WARN, f"where a learner of your own sets no number, {crowded[0]}", crowded[1])
    return Check("learner", Verdict.OK, f"torch uses {threads} threads by default, on {cores} cores")
