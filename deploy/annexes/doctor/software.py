"""Checks of the software: Python, packages and kernel here, and the versions that peers tell."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from headrace.deploy.annexes.doctor.check import Check, Verdict
from headrace.deploy.run.redis_view import FleetView, Snapshot, crowded_learner, told_versions
from headrace.schemas.basics.headrace_version import headrace_version
from headrace.schemas.basics.printable import one_line
from headrace.schemas.basics.process_usage import crowded_cores, own_cores, torch_threads
from headrace.schemas.errors import RedisUnavailableError

_MOST_NAMED = 5
_UNTOLD = "no version told"


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


def connected_checks(url: str, fleet_id: str) -> Iterator[Check]:
    """Compare the versions of the broker, the learner and the workers with one another and with ours.

    Say if the threads of a learner take the cores of workers.
    """
    try:
        with FleetView(url, fleet_id) as view:
            seen = view.read()
    except RedisUnavailableError as error:
        yield Check("connected", Verdict.WARN, str(error))
        return
    yield judge_versions(seen, headrace_version())
    if crowded := crowded_learner(seen):
        yield Check("learner", Verdict.WARN, *crowded)


def own_learner_check(workers: int) -> Check:
    """Say if a learner of one's own would take the cores of these workers, started here with torch's default."""
    threads, cores = torch_threads(), own_cores()  # `software_checks` has loaded torch
    if crowded := crowded_cores(threads, cores, workers):
        return Check("learner", Verdict.WARN, f"where a learner of your own sets no number, {crowded[0]}", crowded[1])
    return Check("learner", Verdict.OK, f"torch uses {threads} threads by default, on {cores} cores")


def judge_versions(seen: Snapshot, own: str) -> Check:
    """Judge the versions in a fleet's state. Peers of several versions work together during an upgrade."""
    told = told_versions(seen)
    if "broker" not in told:
        return Check("connected", Verdict.OK, "no broker has reported yet")
    said = f"{_by_version({**told, 'this machine': own})}{_hosts(seen.workers)}"
    others = [name for name, version in told.items() if version != told["broker"]]
    advice = []
    if own != told["broker"]:
        advice.append(f"install headrace {told['broker']} here, or upgrade the broker")
    if others:
        advice.append(f"install headrace {told['broker']} for {_some(others)}, and start them again")
    return Check("connected", Verdict.WARN if advice else Verdict.OK, said, "; ".join(advice))


def _by_version(told: Mapping[str, str]) -> str:
    names: dict[str, list[str]] = {}
    for name, version in told.items():
        names.setdefault(version or _UNTOLD, []).append(name)
    return "; ".join(f"{version}: {_some(who)}" for version, who in names.items())


def _hosts(workers: Mapping[int, Mapping[str, Any]]) -> str:
    hosts = sorted({one_line(str(row.get("host", ""))) for row in workers.values()} - {""})
    return f"; workers on {_some(hosts)}" if hosts else ""


def _some(names: Collection[str]) -> str:
    shown = list(names)[:_MOST_NAMED]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
