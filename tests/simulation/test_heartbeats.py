"""Workers say heartbeats as rarely as their number asks for, and each gets one answer."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from headrace.broker.batches.limits import BrokerLimits
from headrace.broker.sessions.core import BrokerCore
from headrace.schemas.accounts.ledger import HeldBatch, WorkerTotals
from headrace.schemas.messages import Ack, Heartbeat, WorkerHello, WorkerWelcome
from headrace.workers.fleet.session import SessionState, WorkerSession
from headrace.workers.fleet.window import SessionLimits, Shipment

LIMITS = BrokerLimits()


def broker_of(workers: int) -> tuple[BrokerCore, list[WorkerWelcome]]:
    broker = BrokerCore("f", LIMITS)
    for slot in range(workers):
        broker.receive(b"w%d" % slot, WorkerHello(fleet_id="f", token=f"t{slot}", slot=slot, incarnation=1), 0.0)
    told = [send.content for send in broker.take_outbox() if isinstance(send.content, WorkerWelcome)]
    broker.tick(0.0)
    broker.take_outbox()
    return broker, told


def acks(broker: BrokerCore) -> list[Ack]:
    return [send.content for send in broker.take_outbox() if isinstance(send.content, Ack)]


@pytest.mark.parametrize(("workers", "interval_s"), [(1, 1.0), (200, 1.0), (400, 2.0), (2000, 4.0)])
def test_the_interval_of_heartbeats_follows_the_number_of_workers(workers: int, interval_s: float) -> None:
    broker, told = broker_of(workers)
    assert told[-1].heartbeat_interval_s == interval_s
    broker.receive(b"w0", Heartbeat(slot=0, incarnation=1, totals=WorkerTotals()), 0.1)
    (ack,) = acks(broker)
    assert ack.heartbeat_interval_s == interval_s, "the first worker hears of those that came later"


def test_a_worker_takes_the_interval_of_the_newest_answer() -> None:
    session = WorkerSession(WorkerHello(fleet_id="f", token="t", slot=0, incarnation=1), SessionLimits())
    session.receive(WorkerWelcome(fleet_id="f", slot=0, incarnation=1, max_batch_bytes=1), 0.0)
    session.tick(0.0)
    session.receive(Ack(slot=0, incarnation=1, heartbeat_interval_s=3.0), 0.1)
    session.tick(1.0)
    session.take_outbox()
    spoken = []
    for tenth in range(11, 80):
        session.receive(Ack(slot=0, incarnation=1), tenth / 10)
        session.tick(tenth / 10)
        spoken += [tenth / 10 for out in session.take_outbox() if isinstance(out, Heartbeat)]
    assert spoken == [4.0, 7.0]


def test_steps_without_a_batch_go_with_a_heartbeat_at_once_near_the_fleets_bound() -> None:
    limits = SessionLimits(window_env_steps=8)
    session = WorkerSession(WorkerHello(fleet_id="f", token="t", slot=0, incarnation=1), limits)
    session.receive(WorkerWelcome(fleet_id="f", slot=0, incarnation=1, max_batch_bytes=1, steps_share=12), 0.0)

    def said(now: float) -> Sequence[object]:
        session.tick(now)
        session.tick(now)
        return session.take_outbox()

    said(0.0)
    session.totals = WorkerTotals(stepped=3, discarded={"frozen": 3})
    assert session.may_step()
    assert said(0.1) == [], "12 - 3 steps are more than its window"
    session.totals = WorkerTotals(stepped=5, discarded={"frozen": 5})
    assert not session.may_step()
    (beat,) = said(0.1)
    assert isinstance(beat, Heartbeat)
    assert beat.totals.stepped == 5
    assert not session.may_step(), "the broker has not counted them"
    assert said(0.1) == [], "one heartbeat tells them"
    session.receive(Ack(slot=0, incarnation=1, steps_share=7), 0.1)
    assert session.may_step()
    for seq in (1, 2):
        totals = WorkerTotals(seq=seq, stepped=5 + seq, discarded={"frozen": 5}, shipped=seq, shipped_chunks=seq)
        session.submit(Shipment(HeldBatch(seq=seq, steps=1, chunks=1), 0, None, totals, "oversize"))
        session.receive(Ack(slot=0, incarnation=1, accepted=1, steps_share=6), 0.2)
        assert said(0.2) == [], "batches tell their steps themselves"
    session.totals = totals.model_copy(update={"stepped": 9, "discarded": {"frozen": 7}})
    assert said(0.3) == [], "the broker takes no totals from before it has batch 2"
    assert len(said(3.0)) == 1, "as often as ever"
    assert not session.may_step()
    session.receive(Ack(slot=0, incarnation=1, accepted=2, steps_share=6), 3.1)
    assert len(said(3.1)) == 1
    session.receive(Ack(slot=0, incarnation=1, accepted=2, steps_share=3), 3.1)
    assert session.may_step()
    session.totals = totals.model_copy(update={"stepped": 12, "discarded": {"frozen": 10}})
    session.connected(3.2, again=True)
    (hello,) = said(3.2)
    assert isinstance(hello, WorkerHello)


def test_only_silent_workers_get_an_ack_that_they_did_not_ask_for() -> None:
    broker, _ = broker_of(2)
    answers: dict[int, int] = {0: 0, 1: 0}
    for tenth in range(1, 41):
        now = tenth / 10
        if tenth % 10 == 5:
            broker.receive(b"w0", Heartbeat(slot=0, incarnation=1, totals=WorkerTotals()), now)
        broker.tick(now)
        for ack in acks(broker):
            answers[ack.slot] += 1
    assert answers[0] == 4, "one for each heartbeat"
    assert answers[1] >= 2, "the other may not hear otherwise that the broker lives"


@pytest.mark.parametrize("again", [False, True])
def test_a_worker_introduces_itself_on_a_new_connection_before_it_is_asked(again: bool) -> None:
    session = WorkerSession(WorkerHello(fleet_id="f", token="t", slot=0, incarnation=1), SessionLimits())
    session.receive(WorkerWelcome(fleet_id="f", slot=0, incarnation=1, max_batch_bytes=1), 0.0)
    session.tick(0.0)
    session.take_outbox()
    session.connected(0.1, again=again)
    session.tick(0.1)
    assert [type(out) for out in session.take_outbox()] == ([WorkerHello] if again else [])
    assert session.state is (SessionState.JOINING if again else SessionState.ACTIVE)
