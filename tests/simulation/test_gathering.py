"""Commits and acknowledgements are gathered for a moment before they are sent, and never for longer."""

from __future__ import annotations

from headrace.broker.batches.limits import BrokerLimits
from headrace.broker.sessions.acknowledgements import GATHER_S
from headrace.broker.sessions.core import BrokerCore
from headrace.learner_stub.streaming.session import LearnerSession, StreamLimits
from headrace.schemas.accounts.ledger import Settled, WorkerTotals
from headrace.schemas.chunks.batch import BatchHeader
from headrace.schemas.messages import (
    Ack,
    Bye,
    Commit,
    LearnerHello,
    LearnerWelcome,
    Message,
    SourcePosition,
    Status,
    WorkerHello,
)

LIMITS = StreamLimits(gather_s=0.002, gather_batches=4)


def header(seq: int) -> BatchHeader:
    totals = WorkerTotals(seq=seq, stepped=seq, shipped=seq, shipped_chunks=seq)
    return BatchHeader(fleet_id="f", slot=0, incarnation=1, seq=seq, steps=1, chunks=1, totals=totals)


def joined_learner() -> LearnerSession:
    session = LearnerSession("token", LIMITS)
    session.receive(LearnerWelcome(fleet_id="f", epoch=1), 0.0)
    session.tick(0.0)
    session.take_outbox()
    return session


def train_on(session: LearnerSession, seq: int, now: float, *, at_once: bool) -> None:
    session.receive_batch(header(seq), None, now)
    arrival = session.take()
    assert arrival is not None
    session.settle(arrival, (1, 1), {})
    session.commit(now, at_once=at_once)


def committed(session: LearnerSession) -> list[int]:
    """Up to where each Commit in the outbox settles."""
    return [c.position[0].settled.seq for c in session.take_outbox() if isinstance(c, Commit)]


def joined_broker() -> BrokerCore:
    broker = BrokerCore("f", BrokerLimits())
    broker.receive(b"w", WorkerHello(fleet_id="f", token="t", slot=0, incarnation=1), 0.0)
    broker.take_outbox()
    return broker


def accepted(broker: BrokerCore, now: float) -> list[int]:
    """Up to where each Ack that is due by `now` accepts."""
    return [send.content.accepted for send in broker.take_outbox(now) if isinstance(send.content, Ack)]


def test_a_learner_sends_an_urgent_commit_immediately() -> None:
    session = joined_learner()
    train_on(session, 1, 1.0, at_once=True)
    assert committed(session) == [1]


def test_a_learner_sends_other_commits_together_within_gather_s() -> None:
    session = joined_learner()
    train_on(session, 1, 0.1, at_once=False)
    train_on(session, 2, 0.1001, at_once=False)
    assert committed(session) == []
    assert 0 < session.idle_s(0.1001) <= LIMITS.gather_s
    session.tick(0.1 + LIMITS.gather_s)
    assert committed(session) == [2]


def test_a_learner_sends_commits_without_a_wait_once_enough_are_gathered() -> None:
    session = joined_learner()
    for seq in range(1, 5):
        train_on(session, seq, 0.1, at_once=False)
    assert committed(session) == [4]


def test_a_learner_that_waits_for_a_batch_sends_commits_once_half_as_many_are_gathered() -> None:
    session = joined_learner()
    train_on(session, 1, 0.1, at_once=False)
    session.tick(0.1, waiting=True)
    assert committed(session) == []
    train_on(session, 2, 0.1, at_once=False)
    session.tick(0.1)
    assert committed(session) == []
    session.tick(0.1, waiting=True)
    assert committed(session) == [2]


def test_a_learner_that_joins_does_not_repeat_its_hello_for_gathered_commits() -> None:
    session = LearnerSession("token", LIMITS)
    session._gathered = LIMITS.gather_batches
    session.tick(0.0, waiting=True)
    session.take_outbox()
    session.tick(0.1, waiting=True)
    assert session.take_outbox() == []


def test_the_broker_acknowledges_few_batches_together_within_gather_s() -> None:
    broker = joined_broker()
    for seq in (1, 2):
        broker.receive_batch(b"w", header(seq), [b""], 10, 1.0)
        assert accepted(broker, 1.0) == []
    assert 1.0 < broker.next_due <= 1.0 + GATHER_S
    assert accepted(broker, broker.next_due) == [2]
    assert broker.next_due == float("inf")


def test_the_broker_acknowledges_many_batches_in_one_ack() -> None:
    broker = joined_broker()
    told = []
    for seq in range(1, 9):
        broker.receive_batch(b"w", header(seq), [b""], 10, 1.0)
        told += accepted(broker, 1.0)
    assert told == [8]


def told_exhausted(broker: BrokerCore, session: LearnerSession) -> list[bool]:
    """Pass the broker's messages on to the learner; return whether each Status says that nothing more comes."""
    told = []
    for send in broker.take_outbox(0.0):
        if send.peer == b"l" and isinstance(send.content, Message):
            session.receive(send.content, 0.0)
            told += [session.exhausted] if isinstance(send.content, Status) else []
    return told


def test_the_broker_reports_immediately_that_no_batch_and_no_worker_is_left() -> None:
    """Otherwise a learner that is stopping would wait in vain for a batch, or for the next heartbeat."""
    broker, session = joined_broker(), LearnerSession("token", LIMITS)
    broker.receive(b"l", LearnerHello(token="token", channel="stream"), 0.0)
    assert broker.receive_batch(b"w", header(1), [b""], 100, 0.0)
    assert told_exhausted(broker, session) == []
    session.receive_batch(header(1), None, 0.0)
    totals = WorkerTotals(seq=1, stepped=1, shipped=1, shipped_chunks=1)
    broker.receive(b"w", Bye(slot=0, incarnation=1, totals=totals, settled=Settled(), reason="shutdown"), 0.0)
    assert told_exhausted(broker, session) == [], "its one batch is not settled"
    position = [SourcePosition(slot=0, incarnation=1, settled=Settled(seq=1, committed=(1, 1)))]
    commit = Commit(epoch=session.epoch, position=position, consumed_batches=1)
    broker.receive(b"l", commit, 0.0)
    assert told_exhausted(broker, session) == [True]
    broker.receive(b"l", commit, 0.0)
    assert told_exhausted(broker, session) == [], "it is told once"
    session.receive_batch(header(2), None, 0.0)
    assert not session.exhausted


def test_a_commit_tells_of_the_sources_with_news_and_repeats_the_others_in_time() -> None:
    """With a thousand workers, commits that repeat all of them would fill the broker's core."""
    session = joined_learner()
    for slot in range(200):
        session.receive_batch(header(1).model_copy(update={"slot": slot}), None, 0.0)
        arrival = session.take()
        assert arrival is not None
        session.settle(arrival, (1, 1), {})
    session.commit(0.0)
    session.take_outbox()
    train_on(session, 2, 0.1, at_once=True)
    (news,) = (out.position for out in session.take_outbox() if isinstance(out, Commit))
    assert [(place.slot, place.settled.seq) for place in news] == [(0, 2)]
    repeated: set[int] = set()
    for number in range(1, 8):
        session.receive(Status(epoch=1), number * LIMITS.heartbeat_s)
        session.tick(0.1 + number * LIMITS.heartbeat_s)
        told = [place.slot for out in session.take_outbox() if isinstance(out, Commit) for place in out.position]
        assert len(told) <= 64
        repeated.update(told)
    assert repeated == set(range(200)), "each one again, since any commit may have been lost"
