"""One peer with a valid HELLO at a broker's core: how much it may make the core hold, and how honest peers go on."""

from __future__ import annotations

from functools import reduce
from typing import Any

import pytest

from headrace.broker.batches import slot_owners
from headrace.broker.batches.brought_counts import MOST_BROUGHT_IN_ALL, SURE_IN_OTHER_SLOT
from headrace.broker.batches.limits import BrokerLimits, BrokerState
from headrace.broker.batches.slot_owners import LIVES_PER_S
from headrace.broker.sessions.claims import MOST_BROUGHT
from headrace.broker.sessions.core import BrokerCore
from headrace.schemas.accounts.folded_lives import fold
from headrace.schemas.accounts.ledger import HeldBatch, Settled, WorkerTotals
from headrace.schemas.basics.bounds import WINDOW
from headrace.schemas.chunks.batch import BatchHeader
from headrace.schemas.messages import (
    Ack,
    Commit,
    LearnerHello,
    Message,
    Obituary,
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
LIVES = 50
"""New lives at once where a test has `few_lives`."""


class Broker:
    """A core that is told messages at a time, and its answers."""

    def __init__(self, state: BrokerState | None = None, **limits: Any) -> None:
        self.now = 0.0
        self.core = BrokerCore(FLEET, BrokerLimits(**limits), state)

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


@pytest.fixture
def few_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_owners, "LIVES_AT_ONCE", LIVES)


# -- lives ------------------------------------------------------------------------------------------------------------


def obituary(slot: int, incarnation: int = 1, **changes: Any) -> Obituary:
    said = {"totals": WorkerTotals(), "settled": Settled(), "reason": "worker_killed"} | changes
    return Obituary(slot=slot, incarnation=incarnation, **said)


@pytest.mark.usefixtures("few_lives")
def test_workers_begin_only_so_many_lives_at_a_time_and_are_asked_to_wait() -> None:
    broker = Broker()
    answers = [broker.hello(b"w%d" % slot, slot) for slot in range(3 * LIVES)]
    assert len(broker.core.sources) == LIVES
    assert (answers[-1].code, answers[-1].fatal) == ("too_many_lives", False)
    broker.now += 10.0
    assert isinstance(broker.hello(b"late", 5000), WorkerWelcome)


@pytest.mark.usefixtures("few_lives")
def test_the_configs_own_workers_may_begin_while_others_have_begun_too_many() -> None:
    broker = Broker(workers=4)
    for slot in range(10, 10 + 2 * LIVES):
        broker.hello(b"w%d" % slot, slot)
    assert all(isinstance(broker.hello(b"own%d" % slot, slot), WorkerWelcome) for slot in range(4))


@pytest.mark.usefixtures("few_lives")
def test_obituaries_of_unknown_lives_are_bounded() -> None:
    broker = Broker()
    broker.say(LEARNER, LearnerHello(token="l", channel="stream"))
    broker.say(SUPERVISOR, SupervisorHello(fleet_id=FLEET, token="s"))
    last = [broker.say(SUPERVISOR, obituary(slot)) for slot in range(3 * LIVES)][-1]
    assert len(broker.core.state.incarnations) == LIVES
    assert [said.code for said in last] == ["too_many_lives"]
    broker.now += 1.0
    more = sum(isinstance(broker.say(SUPERVISOR, obituary(10_000 + i))[0], Ack) for i in range(100))
    assert more == LIVES_PER_S


@pytest.mark.usefixtures("few_lives")
def test_a_restarted_broker_knows_its_workers_and_their_ends_whatever_their_number() -> None:
    known = 4 * LIVES
    broker = Broker(BrokerState(incarnations=dict.fromkeys(range(known), 3)))
    broker.say(LEARNER, LearnerHello(token="l", channel="stream"))
    broker.say(SUPERVISOR, SupervisorHello(fleet_id=FLEET, token="s"))
    for slot in range(known // 2):
        assert isinstance(broker.hello(b"w%d" % slot, slot, 3), WorkerWelcome)
    for slot in range(known // 2, known):
        assert [said.closed for said in broker.say(SUPERVISOR, obituary(slot, 3))] == [True]


def test_a_connection_speaks_for_one_life_at_a_time() -> None:
    broker = Broker()
    for slot in range(50):
        broker.hello(WORKER, slot)
    assert [source.slot for source in broker.core.sources.values() if source.peer is not None] == [49]


def brings(steps: int) -> WorkerTotals:
    return WorkerTotals(stepped=steps, discarded={"env_crash": steps})


def tell_of_deaths(broker: Broker, lives: list[tuple[int, int]], totals: WorkerTotals) -> list[str]:
    """Return the codes of the refusals."""
    broker.say(LEARNER, LearnerHello(token="l", channel="stream"))
    broker.say(SUPERVISOR, SupervisorHello(fleet_id=FLEET, token="s"))
    answers = [broker.say(SUPERVISOR, obituary(*life, totals=totals))[0] for life in lives]
    return [said.code for said in answers if isinstance(said, Reject)]


def brought(broker: Broker) -> int:
    return sum(sum(source.totals.discarded.values()) for source in broker.core.sources.values())


def test_what_lives_of_other_slots_bring_leaves_the_room_of_the_configs_own() -> None:
    broker, slots = Broker(workers=4), range(1000, 1500)
    codes = tell_of_deaths(broker, [(slot, 1) for slot in slots], brings(MOST_BROUGHT))
    assert 450 < len(codes) < 500
    assert {*codes} == {"implausible"}
    for slot in range(4):
        own = broker.hello(b"own%d" % slot, slot, totals=brings(MOST_BROUGHT))
        assert isinstance(own, WorkerWelcome)
    assert isinstance(broker.hello(b"other", 2000, totals=brings(SURE_IN_OTHER_SLOT)), WorkerWelcome)
    assert broker.hello(b"more", 2001, totals=brings(SURE_IN_OTHER_SLOT * 1000)).code == "implausible"


def test_what_lives_of_one_slot_bring_leaves_the_room_of_the_others() -> None:
    broker = Broker(workers=4)
    codes = tell_of_deaths(broker, [(0, number) for number in range(1, 100)], brings(MOST_BROUGHT))
    assert len(codes) == 99 - MOST_BROUGHT_IN_ALL // 8 // MOST_BROUGHT
    assert all(isinstance(broker.hello(b"%d" % n, n, totals=brings(MOST_BROUGHT)), WorkerWelcome) for n in (1, 2, 3))


def test_what_all_lives_bring_stays_below_what_lua_can_count() -> None:
    broker, lives = Broker(workers=100), [(slot, 1) for slot in range(100)]
    steps = MOST_BROUGHT
    while steps > SURE_IN_OTHER_SLOT // 4:
        lives = [(slot, number + 1) for slot, number in lives] + [(slot, 1) for slot in range(1000, 1200)]
        tell_of_deaths(broker, lives, brings(steps))
        steps //= 2
    assert MOST_BROUGHT_IN_ALL // 2 < brought(broker) <= MOST_BROUGHT_IN_ALL


@pytest.mark.parametrize("folds", [False, True])
def test_what_lives_brought_to_an_earlier_broker_leaves_less_room_at_the_next(*, folds: bool) -> None:
    first, next_one, lives = Broker(workers=2), Broker(workers=2), [(0, number) for number in range(1, 100)]
    assert len(tell_of_deaths(first, lives, brings(MOST_BROUGHT))) == 99 - MOST_BROUGHT_IN_ALL // 4 // MOST_BROUGHT
    rows = [row for source in first.core.sources.values() if (row := source.ledger_row()) is not None]
    folded = reduce(fold, rows, None) if folds else None
    if folded is not None:
        next_one.core.restore([], {0: 99}, 0, folded={0: folded})
    else:
        next_one.core.restore(rows, {0: 99}, 0)
    assert tell_of_deaths(next_one, [(0, 100), (0, 101)], brings(MOST_BROUGHT)) == ["implausible"] * 2
    assert isinstance(next_one.hello(b"own", 1, totals=brings(MOST_BROUGHT)), WorkerWelcome)


def test_a_repeated_hello_brings_nothing_more() -> None:
    broker = Broker(workers=100)
    for _ in range(3):
        share = brings(MOST_BROUGHT_IN_ALL // 200)
        assert isinstance(broker.hello(WORKER, 1, totals=share), WorkerWelcome)


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
