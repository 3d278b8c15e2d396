"""What `headrace doctor` says of a real Redis server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from headrace.deploy.doctor.check import Verdict
from headrace.deploy.doctor.redis_checks import MOST_OFFSET_S, clock_check, redis_checks, version_check


def checks_of(url: str) -> dict[str, Any]:
    return {check.name: check for check in redis_checks(url, "demo")}


def test_a_server_that_keeps_nothing_and_asks_no_password_is_named(make_server: Callable[..., Any]) -> None:
    server = make_server("--appendonly", "no").start()
    with server.client() as client:
        client.config_set("requirepass", "")
    checks = checks_of(server.url.replace(f":{password_of(server.url)}@", ""))
    assert checks["redis server"].verdict is Verdict.OK
    assert checks["redis data"].verdict is Verdict.WARN
    assert "appendonly yes" in checks["redis data"].advice
    assert checks["redis access"].verdict is Verdict.WARN
    assert "headrace keys redis" in checks["redis access"].advice


def test_the_server_that_a_fleet_starts_is_well(url: str) -> None:
    assert [check.verdict for check in checks_of(url).values()] == [Verdict.OK] * 4
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


def test_an_old_server_is_named() -> None:
    assert version_check({"redis_version": "5.0.14"}).verdict is Verdict.WARN
    assert version_check(
        {"redis_version": "7.2.4", "valkey_version": "8.0.1", "server_name": "valkey"}
    ).seen.startswith("valkey 8.0.1")


def test_a_clock_is_judged_by_more_than_the_message_may_have_taken() -> None:
    assert clock_check(MOST_OFFSET_S + 0.2, 0.1).verdict is Verdict.WARN
    assert clock_check(-MOST_OFFSET_S - 0.2, 0.1).verdict is Verdict.WARN
    assert clock_check(MOST_OFFSET_S + 0.2, 0.5).verdict is Verdict.OK
    assert "does not tell" in clock_check(0.0, -1.0).seen
