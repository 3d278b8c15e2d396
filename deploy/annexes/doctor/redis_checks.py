"""Checks of the fleet's Redis: whether it is usable, its persistence, its access rights, and its clock."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from headrace.broker.redis.client import REDIS_FAILURES, ask, connect
from headrace.deploy.annexes.doctor.check import Check, Verdict
from headrace.deploy.run.redis_server import CHECK_TIMEOUT_S, check_url, find_server
from headrace.schemas.errors import HeadraceError
from headrace.schemas.settings.config import is_loopback

MOST_OFFSET_S = 1.0
"""Seconds by which a clock may be wrong. Ages that people see, and the expiry of addresses, compare two clocks."""
_OLDEST = (6, 0)


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Facts that a server reports about itself, and the offset of its clock from ours."""

    info: Mapping[str, Any]
    user: str
    offset_s: float
    round_trip_s: float


def redis_checks(url: str, fleet_id: str) -> Iterator[Check]:
    """Check the server at `url`; "" for the server that the fleet starts itself."""
    try:
        if not url:
            yield Check("redis server", Verdict.OK, _own_server())
            return
        check_url(url, fleet_id)
        facts = read_facts(url)
    except HeadraceError as error:
        yield Check("redis server", Verdict.FAIL, str(error))
        return
    yield version_check(facts.info)
    yield persistence_check(facts.info)
    yield _access_check(url, facts.user)
    yield clock_check(facts.offset_s, facts.round_trip_s)


def _own_server() -> str:
    program = find_server()
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        told = subprocess.run([program, "--version"], capture_output=True, text=True, check=False, timeout=10)
        return f"{program} ({told.stdout.strip()[:60]})"
    return program


def read_facts(url: str) -> ServerFacts:
    """Return the server's facts. A part is empty if our user may not read it.

    Raises `RedisUnavailableError` for a URL that cannot be understood.
    """
    with contextlib.closing(connect(url, CHECK_TIMEOUT_S)) as client:
        info: dict[str, Any] = {}
        for section in ("server", "persistence"):
            with contextlib.suppress(*REDIS_FAILURES):
                info |= client.info(section)
        user, offset_s, round_trip_s = "", 0.0, -1.0
        with contextlib.suppress(*REDIS_FAILURES):
            told = ask(client, "ACL WHOAMI")
            user = told.decode() if isinstance(told, bytes) else str(told)
        with contextlib.suppress(*REDIS_FAILURES):
            began = time.time()
            seconds, micros = client.time()
            ended = time.time()
            offset_s, round_trip_s = seconds + micros / 1e6 - (began + ended) / 2, ended - began
    return ServerFacts(info, user, offset_s, round_trip_s)


def version_check(info: Mapping[str, Any]) -> Check:
    """Check the server's version."""
    told = str(info.get("valkey_version") or info.get("redis_version") or "")
    seen = f"{info.get('server_name', 'redis')} {told}".strip() if told else "it does not tell its version to this user"
    digits = [int(part) for part in str(info.get("redis_version", "")).split(".")[:2] if part.isdigit()]
    if digits and tuple(digits) < _OLDEST:
        return Check("redis server", Verdict.WARN, seen, "Redis 6 or Valkey has users with least rights: upgrade it")
    return Check("redis server", Verdict.OK, f"{seen}, evicts nothing")


def persistence_check(info: Mapping[str, Any]) -> Check:
    """Check whether the server keeps its data over a restart."""
    name = "redis data"
    if "aof_enabled" not in info:
        return Check(name, Verdict.OK, "it does not tell this user whether it keeps its data")
    if info["aof_enabled"]:
        failed = info.get("aof_last_write_status", "ok") != "ok" or info.get("aof_last_bgrewrite_status", "ok") != "ok"
        if failed:
            return Check(name, Verdict.WARN, "its append-only file could not be written", "look at its log and disk")
        return Check(name, Verdict.OK, "kept, by an append-only file")
    if info.get("rdb_last_bgsave_status", "ok") != "ok":
        return Check(name, Verdict.WARN, "its last snapshot failed", "look at its log and disk")
    if not info.get("rdb_last_save_time") or info.get("rdb_saves") == 0:
        return Check(name, Verdict.WARN, "no append-only file, and no snapshot yet", "CONFIG SET appendonly yes")
    return Check(
        name, Verdict.WARN, "kept by snapshots alone: a crash loses what came since", "CONFIG SET appendonly yes"
    )


def _access_check(url: str, user: str) -> Check:
    """Check who may use the server, and whether the connection is encrypted."""
    parts = urlsplit(url)
    remote, by_tls = not is_loopback(parts.hostname or "localhost"), parts.scheme == "rediss"
    seen = f"user {user or parts.username or 'default'}, {'by TLS' if by_tls else 'without TLS'}"
    if parts.scheme == "unix":
        return Check("redis access", Verdict.OK, f"user {user or 'default'}, by a Unix socket")
    if not parts.password:
        advice = "everyone who reaches its port has all rights: headrace keys redis makes users, and set a password"
        return Check("redis access", Verdict.WARN, f"{seen}, no password", advice)
    if remote and not by_tls:
        advice = "passwords and data can be read on the way: use rediss://, or a private network"
        return Check("redis access", Verdict.WARN, seen, advice)
    if user == "default":
        return Check("redis access", Verdict.OK, f"{seen}; headrace keys redis makes users with fewer rights")
    return Check("redis access", Verdict.OK, seen)


def clock_check(offset_s: float, round_trip_s: float) -> Check:
    """Judge our clock by the server's, to half the round trip. A negative round trip: the server told no time."""
    if round_trip_s < 0:
        return Check("clock offset", Verdict.OK, "the Redis server does not tell this user its time")
    seen = f"{offset_s:+.3f} s to the Redis server, measured to {round_trip_s / 2:.3f} s"
    if abs(offset_s) - round_trip_s / 2 > MOST_OFFSET_S:
        return Check(
            "clock offset", Verdict.WARN, seen, "run an NTP service on both machines: ages shown are wrong by it"
        )
    return Check("clock offset", Verdict.OK, seen)
