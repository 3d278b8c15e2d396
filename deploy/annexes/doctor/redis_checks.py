"""Checks of the fleet's Redis: whether it is usable, its persistence, and its access rights."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from headrace.broker.redis.client import REDIS_FAILURES, ask, connect
from headrace.deploy.annexes.doctor.check import Check, Verdict
from headrace.deploy.run.redis_server import CHECK_TIMEOUT_S, check_url, find_server
from headrace.schemas.errors import HeadraceError
from headrace.schemas.settings.config import is_loopback


def redis_checks(url: str, fleet_id: str) -> Iterator[Check]:
    """Check the server at `url`; "" for the server that the fleet starts itself."""
    try:
        if not url:
            yield Check("redis server", Verdict.OK, _own_server())
            return
        check_url(url, fleet_id)
        info, user = read_facts(url)
    except HeadraceError as error:
        yield Check("redis server", Verdict.FAIL, str(error))
        return
    told = str(info.get("valkey_version") or info.get("redis_version") or "")
    seen = f"{info.get('server_name', 'redis')} {told}" if told else "it does not tell its version to this user"
    yield Check("redis server", Verdict.OK, f"{seen}, evicts nothing")
    yield persistence_check(info)
    yield _access_check(url, user)


def _own_server() -> str:
    program = find_server()
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        told = subprocess.run([program, "--version"], capture_output=True, text=True, check=False, timeout=10)
        return f"{program} ({told.stdout.strip()[:60]})"
    return program


def read_facts(url: str) -> tuple[Mapping[str, Any], str]:
    """Return the server's INFO, and our user there. A part is empty if our user may not read it.

    Raises `RedisUnavailableError` for a URL that cannot be understood.
    """
    info: dict[str, Any] = {}
    user = ""
    with contextlib.closing(connect(url, CHECK_TIMEOUT_S)) as client:
        for section in ("server", "persistence"):
            with contextlib.suppress(*REDIS_FAILURES):
                info |= client.info(section)
        with contextlib.suppress(*REDIS_FAILURES):
            told = ask(client, "ACL WHOAMI")
            user = told.decode() if isinstance(told, bytes) else str(told)
    return info, user


def persistence_check(info: Mapping[str, Any]) -> Check:
    """Check whether the server keeps its data over a restart."""
    name = "redis data"
    if "aof_enabled" not in info:
        return Check(name, Verdict.OK, "it does not tell this user whether it keeps its data")
    if not info["aof_enabled"]:
        seen = "no append-only file: a crash loses what came since its newest snapshot"
        return Check(name, Verdict.WARN, seen, "CONFIG SET appendonly yes")
    if info.get("aof_last_write_status", "ok") != "ok" or info.get("aof_last_bgrewrite_status", "ok") != "ok":
        return Check(name, Verdict.WARN, "its append-only file could not be written", "look at its log and disk")
    return Check(name, Verdict.OK, "kept, by an append-only file")


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
