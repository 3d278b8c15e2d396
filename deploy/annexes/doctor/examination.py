"""The whole examination of a machine, in the order in which it is shown, and its short checks."""

from __future__ import annotations

import importlib
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from headrace.deploy.annexes.doctor.cgroup import read_limits
from headrace.deploy.annexes.doctor.check import Check, Verdict
from headrace.deploy.annexes.doctor.limits import Needs, limit_checks, open_files_check
from headrace.deploy.annexes.doctor.network import advertised_checks, meeting_checks, port_checks, reachability_check
from headrace.deploy.process.proc_stat import is_alive
from headrace.deploy.run.fleet_file import FleetFile, read_fleet_file
from headrace.deploy.run.key_pairs import check_pair
from headrace.deploy.run.redis_server import check_url, find_server
from headrace.schemas.basics.printable import to_paste
from headrace.schemas.basics.process_usage import crowded_cores, own_cores, torch_threads
from headrace.schemas.credentials.keys import BROKER, ENV_HOST, TOKEN_FILE, read_broker_keys, read_client_keys
from headrace.schemas.credentials.tokens import read_token
from headrace.schemas.errors import HeadraceError, KeysError, RunDirError, is_there
from headrace.schemas.settings.config import FleetConfig, is_loopback
from headrace.schemas.settings.redis_url import without_password

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


def sound_roles(folder: Path) -> list[str]:
    """Return the roles that this machine can take with the keys in `folder`. Raises `KeysError` for an unsound key."""
    if not (is_there(folder) and folder.is_dir()):
        raise KeysError(str(folder), f"there is no such folder; headrace keys init --dir {to_paste(folder)}")
    names = sorted(path.stem for path in folder.glob("*.secret"))
    if not names:
        raise KeysError(str(folder), "it has no .secret file; copy those that this machine needs")
    for name in names:
        role, _, group = name.partition(".")
        check_pair(folder / f"{name}.secret")
        if role == BROKER:
            read_broker_keys(folder)
        else:
            read_client_keys(folder, role, group)
    return names


def _without_keys(config: FleetConfig) -> Check:
    host = config.broker.host or config.serving.host
    if not host:
        return Check("keys", Verdict.OK, "none; Unix sockets serve this user alone")
    others = "all users of this machine" if is_loopback(host) else "other machines"
    return Check("keys", Verdict.WARN, f"none; {others} can connect and read along", "headrace keys init")


def _disk(run_dir: Path) -> Check:
    place = run_dir.absolute()
    try:
        while not is_there(place):
            place = place.parent
    except RunDirError as error:
        return Check("run directory", Verdict.FAIL, str(error))
    if not place.is_dir() or not os.access(place, os.W_OK):
        return Check("run directory", Verdict.FAIL, f"{place} is not writable", "choose another with --run-dir")
    free = shutil.disk_usage(place).free
    seen = f"{place}, {free / 2**30:.1f} GiB free"
    if free < _DISK_FAIL:
        return Check("run directory", Verdict.FAIL, seen, "make room, or choose another with --run-dir")
    if free < _DISK_WARN:
        return Check("run directory", Verdict.WARN, seen, "checkpoints and Redis' log will need more in a long run")
    return Check("run directory", Verdict.OK, seen)


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


def redis_checks(url: str, fleet_id: str) -> Iterator[Check]:
    """Check the server at `url`; "" for the server that the fleet starts itself."""
    try:
        if not url:
            yield Check("redis server", Verdict.OK, _own_server())
            return
        check_url(url, fleet_id)
    except HeadraceError as error:
        yield Check("redis server", Verdict.FAIL, str(error))
        return
    yield Check("redis server", Verdict.OK, f"{without_password(url)} takes our writes and evicts nothing")
    yield _access_check(url)


def _own_server() -> str:
    program = find_server()
    with suppress(OSError, subprocess.SubprocessError):
        told = subprocess.run([program, "--version"], capture_output=True, text=True, check=False, timeout=10)
        return f"{program} ({told.stdout.strip()[:60]})"
    return program


def _access_check(url: str) -> Check:
    """Check whether the server asks for a password, and whether the connection is encrypted."""
    parts = urlsplit(without_password(url))
    remote, by_tls = not is_loopback(parts.hostname or "localhost"), parts.scheme == "rediss"
    seen = f"user {parts.username or 'default'}, {'by TLS' if by_tls else 'without TLS'}"
    if parts.scheme == "unix":
        return Check("redis access", Verdict.OK, "by a Unix socket")
    if not parts.password:
        advice = "everyone who reaches its port has all rights: headrace keys redis makes users, and set a password"
        return Check("redis access", Verdict.WARN, f"{seen}, no password", advice)
    if remote and not by_tls:
        advice = "passwords and data can be read on the way: use rediss://, or a private network"
        return Check("redis access", Verdict.WARN, seen, advice)
    return Check("redis access", Verdict.OK, seen)
