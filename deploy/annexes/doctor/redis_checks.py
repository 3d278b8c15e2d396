"""Checks of the fleet's Redis: whether it is usable, and who else may use it."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from urllib.parse import urlsplit

from headrace.deploy.annexes.doctor.check import Check, Verdict
from headrace.deploy.run.redis_server import check_url, find_server
from headrace.schemas.errors import HeadraceError
from headrace.schemas.settings.config import is_loopback
from headrace.schemas.settings.redis_url import without_password


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
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        told = subprocess.run([program, "--version"], capture_output=True, text=True, check=False, timeout=10)
        return f"{program} ({told.stdout.strip()[:60]})"
    return program


def _access_check(url: str) -> Check:
    """Check whether the server asks for a password, and whether the connection is encrypted."""
    parts = urlsplit(url)
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
