"""The whole examination of a machine, in the order in which it is shown."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from headrace.deploy.annexes.doctor.cgroup import read_limits
from headrace.deploy.annexes.doctor.check import Check, Verdict
from headrace.deploy.annexes.doctor.limits import Needs, limit_checks, open_files_check
from headrace.deploy.annexes.doctor.network import advertised_checks, meeting_checks, port_checks, reachability_check
from headrace.deploy.annexes.doctor.redis_checks import redis_checks
from headrace.deploy.annexes.doctor.software import own_learner_check, software_checks
from headrace.deploy.process.proc_stat import is_alive
from headrace.deploy.run.fleet_file import FleetFile, read_fleet_file
from headrace.deploy.run.key_pairs import sound_roles
from headrace.schemas.credentials.keys import ENV_HOST, TOKEN_FILE
from headrace.schemas.credentials.tokens import read_token
from headrace.schemas.errors import KeysError, RunDirError
from headrace.schemas.settings.config import FleetConfig, is_loopback

_DISK_FAIL, _DISK_WARN = 100 << 20, 2 << 30


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
    fleet = _running_fleet(config)
    url, fleet_id = (fleet.redis_url, fleet.fleet_id) if fleet else (config.redis.url, config.fleet.fleet_id)
    yield from redis_checks(url, fleet_id)
    if fleet is not None and "worker" in fleet.endpoints:
        yield reachability_check("broker", fleet.endpoints["worker"])
    else:
        yield from port_checks(config)
        if config.fleet.workers and not config.learner.enabled:
            yield own_learner_check(config.fleet.workers)
    yield from advertised_checks(config)


def _running_fleet(config: FleetConfig) -> FleetFile | None:
    """Return the fleet that runs in the run directory; None without one."""
    with suppress(RunDirError):
        fleet = read_fleet_file(Path(config.fleet.run_dir) / "fleet.json")
        if config.fleet.run_dir and fleet.state == "running" and is_alive(fleet.supervisor_pid):
            return fleet
    return None


def key_checks(config: FleetConfig) -> Iterator[Check]:
    """Check the folder of keys, each file in it, and their modes."""
    if not config.keys.dir:
        yield _without_keys(config)
        return
    folder = Path(config.keys.dir)
    try:
        roles = sound_roles(folder)
        if (folder / TOKEN_FILE).exists():
            read_token(folder / TOKEN_FILE)
    except KeysError as error:
        yield Check("keys", Verdict.FAIL, str(error))
        return
    seen, mode = f"{folder}: {', '.join(roles)}", stat.S_IMODE(folder.stat().st_mode)
    if mode & 0o022:
        yield Check("keys", Verdict.WARN, f"{seen}; others may add files (mode {mode:04o})", f"chmod 700 {folder}")
    else:
        yield Check("keys", Verdict.OK, seen)


def _without_keys(config: FleetConfig) -> Check:
    if is_loopback(config.broker.host):
        return Check("keys", Verdict.OK, "none; only this machine is served")
    return Check("keys", Verdict.WARN, "none; other machines can connect and read along", "headrace keys init")


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
