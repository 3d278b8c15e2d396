"""Lifetime counters of runners in Redis: handed to the next broker, checked, and kept when a slot is empty."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.broker.core import BrokerCore
from headrace.broker.limits import BrokerLimits
from headrace.broker.report import Report, SavedState
from headrace.broker.reporter import RedisReporter
from headrace.schemas.accounts.ledger import WorkerTotals
from headrace.schemas.accounts.redis_keys import RUNNER_STATE, key_name
from headrace.schemas.accounts.runner_counters import LARGEST_BYTES, Counters
from headrace.schemas.messages import Bye, Heartbeat, WorkerHello, WorkerWelcome

KNOWN: Counters = {"num_episodes_lifetime": 7, "num_agent_steps_sampled_lifetime": {"a": 12}}


def saved_by(url: str, fleet_id: str, *reports: Report) -> SavedState:
    """Return the state that Redis has after these reports."""
    reporter = RedisReporter(url, fleet_id)
    for report in reports:
        reporter.offer(report)
    assert reporter.close(30.0)
    following = RedisReporter(url, fleet_id)
    saved = following.take_saved(wait_s=30.0)
    following.close(1.0)
    assert saved is not None
    return saved


def test_the_next_broker_reads_the_reported_runner_state(url: str, fleet_id: str) -> None:
    assert saved_by(url, fleet_id, Report(runner_state={0: KNOWN, 3: {}})).runner_state == {0: KNOWN, 3: {}}
    assert saved_by(url, fleet_id, Report(runner_state={3: KNOWN})).runner_state == {0: KNOWN, 3: KNOWN}


@pytest.mark.parametrize("value", [b"[]", b'{"a": -1}', b"\x80\x04K\x01.", b'{"a": "' + b"x" * LARGEST_BYTES + b'"}'])
def test_malformed_runner_counters_are_logged_and_left_out(
    value: bytes, url: str, fleet_id: str, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    client.hset(key_name(fleet_id, RUNNER_STATE), mapping={"0": value, "x": b"{}"})
    assert saved_by(url, fleet_id).runner_state == {}
    for field in ("0", "x"):
        assert f"left out a value in Redis: runner_state: field b'{field}'" in caplog.text


def welcome(core: BrokerCore, token: str, incarnation: int = 0) -> WorkerWelcome:
    """Return the welcome that a worker of slot 0 gets."""
    core.receive(token.encode(), WorkerHello(fleet_id="f", token=token, slot=0, incarnation=incarnation), 0.0)
    (answer,) = [send.content for send in core.take_outbox() if isinstance(send.content, WorkerWelcome)]
    return answer


def test_a_new_worker_gets_the_lifetime_counters_of_its_slot() -> None:
    core = BrokerCore("f", BrokerLimits())
    core.restore([], {0: 4}, 0, {0: KNOWN})
    first = welcome(core, "a")
    assert (first.incarnation, first.counters) == (5, KNOWN)
    beat = Heartbeat(slot=0, incarnation=5, totals=WorkerTotals(), counters={"num_episodes_lifetime": 9})
    core.receive(b"a", beat, 1.0)
    second = welcome(core, "b")
    assert second.counters == {**KNOWN, "num_episodes_lifetime": 9}
    beat = Heartbeat(slot=0, incarnation=5, totals=WorkerTotals(), counters={"num_episodes_lifetime": 99})
    core.receive(b"a", beat, 2.0)
    assert core.state.counters[0]["num_episodes_lifetime"] == 9, "a superseded life is not listened to"
    bye = Bye(
        slot=0, incarnation=6, totals=WorkerTotals(), settled=second.settled, counters={"num_episodes_lifetime": 11}
    )
    core.receive(b"b", bye, 3.0)
    assert welcome(core, "c").counters["num_episodes_lifetime"] == 11
