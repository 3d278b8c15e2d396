"""The whole examination of a machine, in the order in which it is shown."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headrace.deploy.annexes.doctor.cgroup import read_limits
from headrace.deploy.annexes.doctor.check import Check, Verdict
from headrace.deploy.annexes.doctor.key_checks import key_checks
from headrace.deploy.annexes.doctor.limits import Needs, limit_checks, open_files_check
from headrace.deploy.annexes.doctor.network import advertised_checks, meeting_checks, port_checks, reachability_check
from headrace.deploy.annexes.doctor.redis_checks import redis_checks
from headrace.deploy.annexes.doctor.software import own_learner_check, software_checks
from headrace.deploy.process.proc_stat import is_alive
from headrace.deploy.run.fleet_file import read_fleet_file
from headrace.schemas.credentials.keys import ENV_HOST
from headrace.schemas.errors import RunDirError
from headrace.schemas.settings.config import FleetConfig

_DISK_FAIL, _DISK_WARN = 100 << 20, 2 << 30


@dataclass(frozen=True, slots=True)
class _Fleet:
    """The fleet that runs in the run directory, or the one that the settings name. `broker` is "" where none serves."""

    fleet_id: str
    redis_url: str
    broker: str = ""

    @classmethod
    def of(cls, config: FleetConfig) -> _Fleet:
        configured = cls(config.fleet.fleet_id, config.redis.url)
        if not config.fleet.run_dir:
            return configured
        try:
            running = read_fleet_file(Path(config.fleet.run_dir) / "fleet.json")
        except RunDirError:
            return configured
        if running.state != "running" or not is_alive(running.supervisor_pid):
            return configured
        return cls(running.fleet_id, running.redis_url, running.endpoints.get("worker", ""))


def examine(
    config: FleetConfig, endpoint: str | None = None, rendezvous: str | None = None, role: str = "worker"
) -> Iterator[Check]:
    """Check everything that a fleet of this configuration needs. Starts nothing, leaves nothing behind.

    With the `endpoint` of a server elsewhere, or a `rendezvous`: all that a process of `role` here needs. Where the run
    directory's fleet runs, its broker is checked in place of the ports.
    """
    yield from software_checks()
    yield from key_checks(config)
    is_elsewhere = endpoint is not None or rendezvous is not None
    if not is_elsewhere:
        yield from _here(config)
    elif config.redis.url:
        yield from redis_checks(config.redis.url, config.fleet.fleet_id)
    if endpoint is not None:
        yield reachability_check("worker" if role == ENV_HOST else "broker", endpoint)
    if rendezvous is not None:
        yield from meeting_checks(config, rendezvous, role)
    yield _disk(Path(config.fleet.run_dir))
    yield from limit_checks(Needs.of_role(config, role if is_elsewhere else "fleet"), read_limits())
    yield open_files_check(config.fleet.workers)


def _here(config: FleetConfig) -> Iterator[Check]:
    """Check Redis, addresses and ports of a fleet on this machine, which may run already."""
    fleet = _Fleet.of(config)
    yield from redis_checks(fleet.redis_url, fleet.fleet_id)
    if fleet.broker:
        yield reachability_check("broker", fleet.broker)
    else:
        yield from port_checks(config)
        if config.fleet.workers and not config.learner.enabled:
            yield own_learner_check(config.fleet.workers)
    yield from advertised_checks(config)


def _disk(run_dir: Path) -> Check:
    place = run_dir.absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK):
        return Check("run directory", Verdict.FAIL, f"{place} is not writable", "choose another with --run-dir")
    free = shutil.disk_usage(place).free
    seen = f"{place}, {free / 2**30:.1f} GiB free"
    if free < _DISK_FAIL:
        return Check("run directory", Verdict.FAIL, seen, "make room, or choose another with --run-dir")
    if free < _DISK_WARN:
        return Check("run directory", Verdict.WARN, seen, "checkpoints and Redis' log will need more in a long run")
    return Check("run directory", Verdict.OK, seen)
