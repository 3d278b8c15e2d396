"""Checks of a real Redis server by `headrace doctor`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from headrace.deploy.annexes.doctor.check import Verdict
from headrace.deploy.annexes.doctor.examination import redis_checks


def checks_of(url: str) -> dict[str, Any]:
    return {check.name: check for check in redis_checks(url, "demo")}


def test_a_server_without_a_password_gets_a_warning(make_server: Callable[..., Any]) -> None:
    server = make_server().start()
    with server.client() as client:
        client.config_set("requirepass", "")
    checks = checks_of(server.url.replace(f":{password_of(server.url)}@", ""))
    assert checks["redis server"].verdict is Verdict.OK
    assert checks["redis access"].verdict is Verdict.WARN
    assert "headrace keys redis" in checks["redis access"].advice


def test_a_fleets_own_server_passes_and_a_wrong_password_fails(url: str) -> None:
    assert [check.verdict for check in checks_of(url).values()] == [Verdict.OK] * 2
    refused = checks_of(url.replace(password_of(url), "other"))
    assert list(refused) == ["redis server"]
    assert refused["redis server"].verdict is Verdict.FAIL


def test_a_server_that_evicts_keys_fails(make_server: Callable[..., Any]) -> None:
    (check,) = checks_of(make_server("--maxmemory-policy", "allkeys-lru").start().url).values()
    assert check.verdict is Verdict.FAIL
    assert "allkeys-lru" in check.seen
    assert "noeviction" in check.seen


def password_of(url: str) -> str:
    return urlsplit(url).password or ""
