"""`headrace doctor`: checks whether this machine can run a fleet, and says what to do if not."""

from __future__ import annotations

import importlib
import os
import resource
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import zmq

from headrace.deploy.key_pairs import sound_roles
from headrace.deploy.redis_server import check_url, find_server
from headrace.schemas.config import FleetConfig, is_loopback
from headrace.schemas.errors import HeadraceError, KeysError

_DISK_FAIL, _DISK_WARN = 100 << 20, 2 << 30
_SHM_WARN = 64 << 20
_FILES_PER_WORKER, _FILES_SPARE = 8, 256


class Verdict(StrEnum):
    """The result of a check; a fleet starts unless one fails."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Check:
    """The result of one check: what was seen, and what to do about it.

    `advice` is empty if all is well, or if `seen` already says what to do.
    """

    name: str
    verdict: Verdict
    seen: str
    advice: str = ""


def examine(config: FleetConfig) -> Iterator[Check]:
    """Check everything that a fleet of this configuration needs. Starts nothing, leaves nothing behind."""
    yield _python()
    for name in ("torch", "gymnasium", "numpy", "zmq", "redis"):
        yield _package(name)
    yield _zmq()
    yield _keys(config)
    yield _redis(config)
    yield from _ports(config)
    yield _disk(Path(config.fleet.run_dir))
    yield _shared_memory()
    yield _open_files(config.fleet.workers)
    yield _cores(config.fleet.workers)
    yield _pidfd()
    yield _clock()


def _python() -> Check:
    return Check("python", Verdict.OK, f"{sys.version.split()[0]} at {sys.executable}")  # pip refuses an older one


def _package(name: str) -> Check:
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        return Check(name, Verdict.FAIL, str(error), "install Headrace again: pip install headrace")
    return Check(name, Verdict.OK, str(getattr(module, "__version__", "installed")))


def _zmq() -> Check:
    seen = f"libzmq {zmq.zmq_version()}"
    if zmq.zmq_version_info() < (4, 2):
        return Check("libzmq", Verdict.FAIL, seen, "pip install --upgrade pyzmq")
    if not zmq.has("curve"):
        return Check("libzmq", Verdict.WARN, f"{seen} without CURVE", "other machines can be served only unencrypted")
    return Check("libzmq", Verdict.OK, seen)


def _keys(config: FleetConfig) -> Check:
    folder = Path(config.keys.dir)
    if not config.keys.dir:
        if is_loopback(config.broker.host) and is_loopback(config.sampling.env_hosts_host):
            return Check("keys", Verdict.OK, "none; only this machine is served")
        return Check("keys", Verdict.WARN, "none; other machines can connect and read along", "headrace keys init")
    try:
        roles = sound_roles(folder)
    except KeysError as error:
        return Check("keys", Verdict.FAIL, str(error))
    return Check("keys", Verdict.OK, f"{folder}: {', '.join(roles)}")


def _redis(config: FleetConfig) -> Check:
    try:
        if config.redis.url:
            check_url(config.redis.url)
            return Check("redis server", Verdict.OK, "the configured one answers")
        return Check("redis server", Verdict.OK, find_server())
    except HeadraceError as error:
        return Check("redis server", Verdict.FAIL, str(error))


def _ports(config: FleetConfig) -> Iterator[Check]:
    broker, sampling = config.broker, config.sampling
    for name in ("worker_port", "learner_port", "weights_port"):
        yield _port(name, broker.host, getattr(broker, name), f"broker.{name}")
    if sampling.env_placement == "remote":
        first = sampling.env_hosts_port
        for slot in range(config.fleet.workers if first else 1):
            name = f"env hosts {slot}" if first else "env hosts"
            yield _port(name, sampling.env_hosts_host, first and first + slot, "sampling.env_hosts_port")


def _port(name: str, host: str, port: int, setting: str) -> Check:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
        except OSError as error:
            seen = f"{host}:{port} {error.strerror}"
            return Check(name, Verdict.FAIL, seen, f"stop the program that holds it, or choose another {setting}")
    return Check(name, Verdict.OK, f"{host}:{port or 'any free port'}")


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


def _shared_memory() -> Check:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError as error:
        return Check(
            "shared memory", Verdict.WARN, f"/dev/shm: {error.strerror}", "torch may want it: mount a tmpfs there"
        )
    seen = f"/dev/shm, {free / 2**20:,.0f} MiB free"
    if free < _SHM_WARN:
        return Check("shared memory", Verdict.WARN, seen, "give the container more: docker run --shm-size=1g")
    return Check("shared memory", Verdict.OK, seen)


def _open_files(workers: int) -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = _FILES_SPARE + _FILES_PER_WORKER * workers
    seen = f"{soft} allowed, about {need} needed"
    if soft != resource.RLIM_INFINITY and soft < need:
        return Check("open files", Verdict.WARN, seen, f"ulimit -n {2 * need}")
    return Check("open files", Verdict.OK, seen)


def _cores(workers: int) -> Check:
    cores = len(os.sched_getaffinity(0))
    seen = f"{cores} for {workers} workers and a learner"
    if workers > cores:
        return Check("cores", Verdict.WARN, seen, f"workers will share cores; --workers {cores} is as fast")
    return Check("cores", Verdict.OK, seen)


def _pidfd() -> Check:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError) as error:
        return Check("pidfd", Verdict.FAIL, str(error), "the supervisor needs Linux 5.3 or newer")
    return Check("pidfd", Verdict.OK, os.uname().release)


def _clock() -> Check:
    year = time.gmtime().tm_year
    if year < 2024:
        return Check("clock", Verdict.WARN, f"the year is {year}", "set the clock: logs and fleet.json bear its times")
    start = time.monotonic_ns()
    while (tick := time.monotonic_ns()) == start:
        pass
    return Check(
        "clock", Verdict.OK, f"{time.strftime('%Y-%m-%d %H:%M:%S %Z')}, monotonic in steps of {tick - start} ns"
    )
