"""Groups of env failures: each failure counts once, through repeats, restarts and losses."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from headrace.broker.redis.parser import HashParser
from headrace.broker.reports.env_error_totals import MOST_GROUPS, EnvErrors
from headrace.schemas.accounts.env_errors import MOST_GROUPS as MOST_OF_A_LIFE
from headrace.schemas.accounts.env_errors import MOST_TRACEBACK, OTHERS, EnvErrorGroup, EnvErrorRow
from headrace.schemas.errors import (
    EnvContractError,
    EnvCrashError,
    EnvHangError,
    EnvHostLostError,
    EnvNeighbourError,
    EnvRaisedError,
)
from headrace.workers.envs.failures import Failure
from headrace.workers.metrics.totals import FailureGroups


def group(name: str = "a", count: int = 1, at: float = 100.0, **facts: Any) -> EnvErrorGroup:
    facts = {"kind": "env_exception", "where": name, "first_unix_s": 100.0, "last_unix_s": at, **facts}
    return EnvErrorGroup(count=count, **facts)


def counts(errors: EnvErrors) -> dict[str, int]:
    """The counts by place."""
    return {row["where"] or row["kind"]: row["count"] for row in errors.rows().values()}


def restarted(errors: EnvErrors) -> dict[str, EnvErrorRow]:
    """Return the groups that the next broker reads from Redis."""
    parser = HashParser()
    saved = parser.env_errors({name.encode(): orjson.dumps(row) for name, row in errors.rows().items()})
    assert not parser.garbage
    return saved


def test_a_failure_counts_once_across_repeats_lives_slots_and_brokers() -> None:
    errors = EnvErrors()
    for slot, incarnation, count in ((0, 1, 3), (0, 1, 3), (0, 1, 2), (1, 1, 4), (0, 2, 1), (0, 1, 9), (0, 2, 2)):
        errors.take(slot, incarnation, group(count=count), unix_s=200.0)
    assert counts(errors) == {"a": 3 + 4 + 2}
    saved, later = restarted(errors), EnvErrors()
    later.take(0, 2, group(count=5, at=150.0), unix_s=200.0)
    later.take(2, 1, group("b"), unix_s=200.0)
    later.go_on_from(saved)
    assert counts(later) == {"a": 3 + 4 + 5, "b": 1}
    later.take(1, 1, group(count=4), unix_s=200.0)
    later.take(1, 2, group(count=1, at=10.0**10), unix_s=300.0)
    [row] = (row for row in later.rows().values() if row["where"] == "a")
    assert (row["count"], row["slots"], row["first_unix_s"], row["last_unix_s"]) == (13, [0, 1], 100.0, 300.0)
    assert row["lives"] == {"0/2": 5, "1/2": 1}


def test_error_groups_are_bounded_and_the_oldest_are_merged_without_recounts() -> None:
    errors = EnvErrors()
    for number in range(MOST_GROUPS + 20):
        errors.take(number, 1, group(f"place {number}", count=2, at=100.0 + number), unix_s=1e9)
    assert len(errors.rows()) == MOST_GROUPS
    assert counts(errors)[OTHERS] == 2 * 21
    errors.take(0, 1, group("place 0", count=3, at=1000.0), unix_s=1e9)
    assert counts(errors)["place 0"] == 1
    assert sum(counts(errors).values()) == 2 * (MOST_GROUPS + 20) + 1
    for number in range(1000):
        errors.take(5, 2, group(f"invented {number}"), unix_s=1e9)
    assert sum(counts(errors).values()) == 2 * (MOST_GROUPS + 20) + 1 + MOST_OF_A_LIFE + 1


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except type(error) as caught:
        return caught


TRACE = 'Traceback:\n  File "/env.py", line 3, in step\n  File "/deep.py", line 7, in f\nValueError: bad'
STACK = 'Thread 1 (most recent call first):\n  File "/env.py", line 9 in step\n  File "/main.py", line 1 in main'


@pytest.mark.parametrize(
    ("error", "kind", "exception", "where"),
    [
        (raised(RuntimeError("x")), "env_exception", "RuntimeError", "test_env_errors.py:"),
        (EnvContractError("reward", "nan", "finite"), "env_bad_data", "EnvContractError", "reward"),
        (EnvRaisedError("ValueError", "bad", TRACE), "env_exception", "ValueError", "/deep.py:7"),
        (EnvHangError(0, "step", 1.0, "env_step_timeout_s", STACK), "env_hang", "EnvHangError", "/env.py:9"),
        (EnvCrashError(1, "SIGSEGV", "in step", STACK, ""), "env_crash", "EnvCrashError", "/env.py:9"),
        (EnvHostLostError("host-a", "left"), "env_host_lost", "EnvHostLostError", ""),
    ],
)
def test_an_error_group_has_the_kind_exception_and_place_of_its_failure(
    error: BaseException, kind: str, exception: str, where: str
) -> None:
    groups = FailureGroups()
    for _ in range(3):
        Failure(0, error).note(groups, "Env-v0")
    [found] = groups.all()
    assert (found.kind, found.env, found.exception, found.count) == (kind, "Env-v0", exception, 3)
    assert where in found.where
    assert len(found.traceback.encode()) <= MOST_TRACEBACK


def test_a_worker_sends_a_bounded_number_of_error_groups_in_turn() -> None:
    groups = FailureGroups()
    assert groups.next() is None
    Failure(0, EnvNeighbourError(1, "SIGSEGV")).note(groups, "Env-v0")
    assert groups.next() is None
    for number in range(2 * MOST_OF_A_LIFE):
        long = "\x1b" * 9000 + "end\ud800"
        Failure(0, EnvRaisedError(f"Error{number}", long, long)).note(groups, "Env-v0")
    told = [groups.next() for _ in range(MOST_OF_A_LIFE + 1)]
    assert all(told)
    assert sum(one.count for one in told if one is not None) == 2 * MOST_OF_A_LIFE
    assert {one.fingerprint for one in groups.all()} == {one.fingerprint for one in told if one is not None}
    assert OTHERS in {one.kind for one in groups.all()}
