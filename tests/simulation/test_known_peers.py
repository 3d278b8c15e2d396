"""One peer with a valid HELLO at a broker's core: how much it may make the core hold, and how honest peers go on."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.broker.batches.limits import BrokerLimits
from headrace.broker.sessions.core import BrokerCore
from headrace.schemas.accounts.ledger import HeldBatch, Settled
from headrace.schemas.basics.bounds import BROKER_CONNECTIONS, WINDOW
from headrace.schemas.chunks.batch import BatchHeader
from headrace.schemas.messages import (
    Ack,
    Commit,
    LearnerHello,
    Message,
    Reject,
    Skip,
    SourcePosition,
    SupervisorHello,
    WorkerHello,
    WorkerWelcome,
)
from headrace.workers.fleet.session import WorkerSession
from headrace.workers.fleet.window import SessionLimits, Shipment
from support.simulation.even_batches import settled, totals

FLEET, WORKER, OTHER, LEARNER, SUPERVISOR = "fleet", b"w1", b"w2", b"l1", b"w3"
MIB = 1 << 20


class Broker:
    """A core that is told messages at a time, and its answers."""

    def __init__(self, **limits: Any) -> None:
        self.now = 0.0
        self.core = BrokerCore(FLEET, BrokerLimits(**limits))

    def say(self, peer: bytes, message: Message) -> list[Any]:
        self.core.receive(peer, message, self.now)
        return [send.content for send in self.core.take_outbox() if send.peer == peer]

    def hello(self, peer: bytes = WORKER, slot: int = 0, incarnation: int = 1, **changes: Any) -> Any:
        said = {"fleet_id": FLEET, "token": f"{slot}", "slot": slot, "incarnation": incarnation} | changes
        return next(said for said in self.say(peer, WorkerHello(**said)) if not isinstance(said, Ack))

    def ship(self, seq: int, nbytes: int, slot: int = 0, peer: bytes = WORKER) -> list[Any]:
        """Return the answers to a batch."""
        header = BatchHeader(fleet_id=FLEET, slot=slot, incarnation=1, seq=seq, steps=10, chunks=2, totals=totals(seq))
        self.core.receive_batch(peer, header, [b""], nbytes, self.now)
        return [send.content for send in self.core.take_outbox() if send.peer == peer]

    def accepted(self, slot: int = 0) -> int:
        return self.core.sources[slot, 1].accepted


def refusals(broker: Broker) -> dict[tuple[str, str], int]:
    return dict(broker.core.refusals.counts)


def skip(seq: int) -> Skip:
    batch = HeldBatch(seq=seq, steps=10, chunks=2)
    return Skip(slot=0, incarnation=1, batch=batch, reason="poison", totals=totals(seq))


def test_a_worker_that_ignores_its_credit_has_no_more_held_than_is_configured() -> None:
    broker = Broker(max_held_bytes=32 * MIB, max_batch_bytes=4 * MIB)
    assert broker.hello().credit == 8
    for seq in range(1, 400):
        broker.ship(max(broker.accepted() + 1, seq), MIB)
        assert broker.core.store.nbytes <= 33 * MIB
    assert 8 <= broker.accepted() <= 33
    assert {kind for _, kind in refusals(broker)} == {"beyond_credit"}
    assert any(peer.startswith("worker 0 ") for peer, _ in refusals(broker))


def test_small_batches_first_buy_no_room_for_large_ones() -> None:
    broker = Broker(max_held_bytes=32 * MIB, max_batch_bytes=4 * MIB)
    broker.hello()
    for seq in range(1, 20):
        broker.ship(seq, 100)
    assert broker.core.sources[0, 1].credit > 500
    for _ in range(100):
        broker.ship(broker.accepted() + 1, 4 * MIB)
    assert broker.core.store.nbytes <= 36 * MIB


def test_many_workers_that_may_each_send_one_batch_hold_one_more_than_is_configured() -> None:
    broker = Broker(max_held_bytes=32 * MIB, max_batch_bytes=4 * MIB)
    for slot in range(50):
        broker.hello(b"w%d" % slot, slot)
    for slot in range(50):
        broker.ship(1, 4 * MIB, slot, b"w%d" % slot)
    assert broker.core.store.nbytes <= 36 * MIB
    assert {kind for _, kind in refusals(broker)} == {"no_room"}, "each kept to the credit that it was told"


@pytest.mark.parametrize(("room", "credit"), [(1, 1), (0, 0)])
def test_a_worker_without_held_batches_may_send_one_until_the_broker_is_full(room: int, credit: int) -> None:
    broker = Broker(max_held_bytes=MIB, max_batch_bytes=MIB)
    broker.hello()
    broker.ship(1, MIB - room)
    assert broker.hello(OTHER, 1).credit == credit


def test_in_rounds_each_worker_may_send_one_batch_although_the_broker_is_full() -> None:
    """The learner takes slots in order, so the batch that it waits for may be the last to come."""
    broker = Broker(max_held_bytes=MIB, max_batch_bytes=MIB, synchronous=True)
    for slot in range(5):
        broker.hello(b"w%d" % slot, slot)
        broker.ship(1, MIB, slot, b"w%d" % slot)
        assert broker.accepted(slot) == 1


def test_a_refused_batch_ends_no_worker_and_is_sent_again() -> None:
    broker = Broker(max_held_bytes=MIB, max_batch_bytes=MIB)
    broker.hello()
    broker.ship(1, MIB)
    (reject,) = [said for said in broker.ship(2, MIB) if isinstance(said, Reject)]
    assert (reject.code, reject.fatal, reject.seq) == ("beyond_credit", False, 0)
    session = joined(credit=2, batches=2)
    assert sent(session) == [1, 2]
    session.receive(Ack(slot=0, incarnation=1, accepted=1, settled=Settled(), credit=2), 0.1)
    session.receive(reject, 0.2)
    session.tick(0.2)
    (again,) = [said for said in session.take_outbox() if isinstance(said, WorkerHello)]
    assert broker.hello(totals=again.totals).credit == 1
    broker.say(LEARNER, LearnerHello(token="l", channel="stream"))
    broker.say(LEARNER, Commit(epoch=1, position=[SourcePosition(slot=0, incarnation=1, settled=settled(1))]))
    broker.ship(2, MIB)
    assert broker.accepted() == 2


def test_a_skip_obeys_credit() -> None:
    broker = Broker(max_held_bytes=4 * MIB, max_batch_bytes=MIB)
    broker.hello()
    for seq in range(1, 5):
        broker.ship(seq, MIB)
    assert broker.core.sources[0, 1].credit == 4
    (reject,) = [said for said in broker.say(WORKER, skip(5)) if isinstance(said, Reject)]
    assert (reject.code, reject.fatal) == ("beyond_credit", False)
    assert broker.accepted() == 4


def test_no_worker_has_more_batches_unsettled_than_a_recorder_has_places() -> None:
    broker = Broker(overflow="drop_oldest")
    broker.core.store.is_reconciled = True
    assert broker.hello().credit == WINDOW
    for seq in range(1, WINDOW + 10):
        broker.ship(seq, 100)
    assert broker.accepted() == WINDOW


def test_a_connection_speaks_for_one_life_at_a_time() -> None:
    broker = Broker()
    for slot in range(50):
        broker.hello(WORKER, slot)
    assert [source.slot for source in broker.core.sources.values() if source.peer is not None] == [49]


def test_supervisors_and_learners_that_reconnect_for_ever_leave_nothing_behind() -> None:
    broker = Broker()
    broker.say(SUPERVISOR, SupervisorHello(fleet_id=FLEET, token="s"))
    for number in range(BROKER_CONNECTIONS + 10):
        broker.say(b"w%d" % number, SupervisorHello(fleet_id=FLEET, token="s"))
        broker.say(SUPERVISOR, SupervisorHello(fleet_id=FLEET, token="s"))
    assert len(broker.core.workers.supervisors) == BROKER_CONNECTIONS
    assert broker.core.knows(SUPERVISOR), "it has said HELLO again"
    for number in range(10):
        stream, publisher = b"l%d" % number, b"lp%d" % number
        broker.say(stream, LearnerHello(token="l", channel="stream"))
        broker.core.gone(stream)
        broker.say(publisher, LearnerHello(token="l", channel="publisher"))
        broker.core.expel(publisher, "revoked_key", "")
    lease = broker.core.learners.lease
    assert lease is not None
    assert lease.weights_told == {}


# -- a worker beside a broker that stands still -----------------------------------------------------------------------


def joined(credit: int, batches: int) -> WorkerSession:
    """A session that a broker has welcomed, with batches to send."""
    session = WorkerSession(WorkerHello(fleet_id=FLEET, token="t", slot=0, incarnation=1), SessionLimits(2000))
    session.receive(welcome(credit), 0.0)
    for seq in range(1, batches + 1):
        session.submit(Shipment(HeldBatch(seq=seq, steps=10, chunks=2), 100, [b""], totals(seq)))
    return session


def welcome(credit: int) -> WorkerWelcome:
    return WorkerWelcome(
        fleet_id=FLEET,
        slot=0,
        incarnation=1,
        accepted=0,
        settled=Settled(),
        credit=credit,
        max_batch_bytes=MIB,
        lease_s=10.0,
        heartbeat_interval_s=1.0,
        encodings=["lz4"],
        weights_endpoint="",
    )


def sent(session: WorkerSession) -> list[int]:
    return [said.batch.seq for said in session.take_outbox() if isinstance(said, Shipment)]


def test_a_worker_repeats_no_batch_while_its_broker_is_silent() -> None:
    session = joined(credit=800, batches=800)
    assert len(sent(session)) == 800
    for second in range(1, 10):
        session.tick(float(second))
        assert not sent(session)
    session.receive(Ack(slot=0, incarnation=1, accepted=0, settled=Settled(), credit=800), 9.0)
    session.tick(9.1)
    assert len(sent(session)) == 800, "a broker that is heard, and has accepted none, may have lost them"


def test_a_worker_that_is_welcomed_twice_sends_its_window_once() -> None:
    """A broker that stood still answers each of the HELLOs that its worker has repeated meanwhile."""
    session = joined(credit=800, batches=800)
    assert len(sent(session)) == 800
    for _ in range(50):
        session.receive(welcome(800), 1.0)
        assert not sent(session)
