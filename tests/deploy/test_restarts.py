"""Backoff and the crash-loop breaker."""

from __future__ import annotations

import random

import pytest

from headrace.deploy.process import restarts
from headrace.deploy.process.restarts import RestartPolicy

ATTEMPTS = 6


@pytest.fixture(autouse=True)
def pauses_begin_with_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "BACKOFF_S", 1.0)


def test_pauses_double_up_to_the_longest_and_are_jittered() -> None:
    policy = RestartPolicy(8, random.Random(1))
    pauses = [policy.after_death(1.0) for _ in range(8)]
    for pause, full in zip(pauses, (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 50.0, 50.0), strict=True):
        assert pause is not None
        assert full / 2 <= pause <= full
    assert len(set(pauses)) == len(pauses)


def test_a_first_death_after_a_long_life_is_restarted_without_a_pause() -> None:
    policy = RestartPolicy(ATTEMPTS, random.Random(1))
    pauses = [policy.after_death(lived_s) for lived_s in (10.0, 10.0, 51.0, 61.0)]
    assert pauses[0] == 0.0
    assert pauses[1] is not None
    assert 1.0 <= pauses[1] <= 2.0, "two deaths in one window are no accident"
    assert pauses[2:] == [pytest.approx(1.5, abs=0.5), 0.0]
    assert RestartPolicy(ATTEMPTS, random.Random(1)).after_death(9.9) != 0.0


def test_the_budget_is_spent_by_short_lives_however_long_the_pauses() -> None:
    policy = RestartPolicy(ATTEMPTS, random.Random(1))
    assert all(policy.after_death(3.0) is not None for _ in range(6))
    assert policy.after_death(3.0) is None
    assert policy.deaths_in_window == 7


def test_long_lives_never_spend_the_budget_and_shorten_the_pause() -> None:
    policy = RestartPolicy(ATTEMPTS, random.Random(1))
    for _ in range(3):
        policy.after_death(1.0)
    for _ in range(50):
        pause = policy.after_death(61.0)
        assert pause is not None
        assert pause <= 1.0


def test_a_budget_of_zero_allows_no_restart() -> None:
    assert RestartPolicy(0, random.Random(0)).after_death(1e6) is None


def test_lives_that_delivered_nothing_spend_the_budget_at_any_pace() -> None:
    policy = RestartPolicy(ATTEMPTS, random.Random(1))
    assert all(policy.after_death(1e4, has_delivered=False) is not None for _ in range(6))
    assert policy.after_death(1e4, has_delivered=False) is None
    assert policy.fruitless == 7


def test_a_life_that_delivered_gives_the_whole_budget_back() -> None:
    policy = RestartPolicy(ATTEMPTS, random.Random(1))
    for delivered in [*[False] * 6, True, *[False] * 6]:
        assert policy.after_death(1e4, has_delivered=delivered) is not None
