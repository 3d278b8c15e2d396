"""A worker keeps each batch until the learner and all consumer groups that the broker names have settled it."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.schemas.accounts.ledger import HeldBatch, Settled, WorkerTotals
from headrace.schemas.basics.bounds import WINDOW
from headrace.schemas.frames.compression import LZ4
from headrace.schemas.messages import Ack, Bye, WorkerHello, WorkerWelcome
from headrace.workers.fleet.session import WorkerSession
from headrace.workers.fleet.window import SessionLimits, Shipment


def _settled(seq: int) -> Settled:
    return Settled(seq=seq, committed=(10 * seq, seq))


def _welcome(session: WorkerSession, **told: Any) -> None:
    told = {"encodings": [LZ4], "credit": WINDOW, **told}
    session.receive(WorkerWelcome(fleet_id="f", slot=0, incarnation=1, max_batch_bytes=1, **told), 0.0)


def _ack(session: WorkerSession, accepted: int, settled: int, groups: dict[str, int], **told: Any) -> None:
    by_group = {name: _settled(seq) for name, seq in groups.items()}
    ack = Ack(slot=0, incarnation=1, accepted=accepted, settled=_settled(settled), groups=by_group, **told)
    session.receive(ack, 0.0)


def _shipped(batches: int, **limits: Any) -> WorkerSession:
    """A session that has sent `batches` of 10 steps and 1 byte."""
    session = WorkerSession(WorkerHello(fleet_id="f", token="t", slot=0, incarnation=1), SessionLimits(**limits))
    _welcome(session)
    for seq in range(1, batches + 1):
        session.submit(Shipment(HeldBatch(seq=seq, steps=10, chunks=1), 1, [b"x"], WorkerTotals(seq=seq)))
    _sent(session)
    return session


def _sent(session: WorkerSession) -> list[int]:
    return [out.batch.seq for out in session.take_outbox() if isinstance(out, Shipment)]


def _lose_broker(session: WorkerSession) -> WorkerHello:
    session.connected(1.0, again=True)
    session.tick(1.0)
    (hello,) = session.take_outbox()
    assert isinstance(hello, WorkerHello)
    return hello


def _kept(session: WorkerSession) -> list[int]:
    return [batch.seq for batch in session.window()]


def test_a_batch_is_kept_until_the_slowest_group_has_settled_it() -> None:
    session = _shipped(6)
    _ack(session, 6, 5, {"record": 2, "eval": 4})
    assert (_kept(session), session.settled.seq) == ([3, 4, 5, 6], 5)
    _ack(session, 6, 5, {"record": 5, "eval": 3})
    assert _kept(session) == [5, 6], "what a group has settled never shrinks"
    _ack(session, 6, 5, {"record": 5})
    assert _kept(session) == [6], "a group that is removed keeps no batch"


def test_a_new_broker_gets_again_what_only_a_group_lacks() -> None:
    session = _shipped(6)
    _ack(session, 6, 5, {"record": 2})
    hello = _lose_broker(session)
    assert (hello.settled.seq, hello.groups["record"].seq) == (5, 2)
    _welcome(session, accepted=2, settled=_settled(5), groups={"record": _settled(2)})
    assert session.unaccepted() == 4
    assert _sent(session) == [3, 4, 5, 6]
    _ack(session, 3, 5, {"record": 2})
    assert session.unaccepted() == 3, "the learner has settled batches that the new broker has not accepted yet"


def test_a_new_broker_with_a_new_group_cannot_ask_for_what_is_forgotten() -> None:
    session = _shipped(6)
    _ack(session, 6, 5, {})
    _lose_broker(session)
    _welcome(session, accepted=0, settled=_settled(5), groups={"record": Settled()})
    assert (session.accepted, _sent(session)) == (5, [6])


def test_the_last_words_have_all_kept_batches_and_what_each_group_has_settled() -> None:
    session = _shipped(4)
    _ack(session, 4, 4, {"record": 1})
    session.leave("shutdown")
    session.tick(0.0)
    (bye,) = (out for out in session.take_outbox() if isinstance(out, Bye))
    assert [batch.seq for batch in bye.window] == [2, 3, 4]
    assert (bye.settled.seq, bye.groups["record"].seq) == (4, 1)


def test_a_slow_group_takes_nothing_of_the_steps_that_the_learner_wants_under_way() -> None:
    session = _shipped(6, window_batches=5)
    _ack(session, 6, 3, {"record": 0}, window_steps=40)
    assert session.has_room(), "three batches are the learner's, which wants four"
    _ack(session, 6, 4, {"record": 0}, window_steps=20)
    assert not session.has_room(), "two are the learner's, and it wants no more"
    assert session.late_groups(1) == []


@pytest.mark.parametrize("limits", [{"follows_learner": True}, {"follows_learner": False}])
def test_a_group_may_be_many_batches_behind_the_learner(limits: dict[str, Any]) -> None:
    session = _shipped(40, window_batches=4, **limits)
    _ack(session, 40, 37, {"record": 0}, window_steps=35)
    assert session.has_room()
    session = _shipped(40, window_batches=4, **limits)
    _ack(session, 40, 36, {"record": 0}, window_steps=35)
    assert not session.has_room()
    assert session.late_groups(1) == [], "the learner is late too"


@pytest.mark.parametrize("limits", [{"window_bytes": 4}, {"window_bytes": 4, "follows_learner": False}])
def test_a_worker_waits_for_a_group_that_is_all_its_bytes_behind_the_learner(limits: dict[str, Any]) -> None:
    session = _shipped(4, **limits)
    _ack(session, 4, 4, {"eval": 4, "record": 1}, window_steps=100)
    assert session.has_room()
    session = _shipped(4, **limits)
    _ack(session, 4, 4, {"eval": 4, "record": 0}, window_steps=100)
    assert not session.has_room()
    assert session.late_groups(1) == ["record"]
    _ack(session, 4, 4, {"eval": 4, "record": 4}, window_steps=100)
    assert session.has_room()


def test_all_kept_batches_fit_the_recorder() -> None:
    session = _shipped(WINDOW - 2, window_batches=2 * WINDOW)
    _ack(session, WINDOW - 2, WINDOW - 2, {"record": 0}, window_steps=1000)
    assert session.has_room()
    session = _shipped(WINDOW - 1, window_batches=2 * WINDOW)
    _ack(session, WINDOW - 1, WINDOW - 1, {"record": 0}, window_steps=1000)
    assert not session.has_room()
    assert session.late_groups(1) == ["record"]


def test_a_batch_that_the_learner_does_not_get_is_kept_with_its_bytes_for_a_group() -> None:
    session = _shipped(2)
    _ack(session, 2, 0, {"record": 0}, dropped={"stale": [1, 2]})
    _lose_broker(session)
    _welcome(session, accepted=0, groups={"record": Settled()})
    assert _sent(session) == [1, 2]
    alone = _shipped(2)
    _ack(alone, 2, 0, {}, dropped={"stale": [1, 2]})
    _lose_broker(alone)
    _welcome(alone, accepted=0)
    assert _sent(alone) == [], "Skips take their place"


def test_groups_that_tell_of_batches_that_were_not_cut_are_ignored() -> None:
    session = _shipped(2)
    _ack(session, 2, 2, {"record": 3})
    assert (session.accepted, _kept(session)) == (0, [1, 2])
