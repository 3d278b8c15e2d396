"""Implausible claims of peers to the broker's core: each is refused and counted, and changes no books."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from simulation.fuzz import play, play_honestly

from headrace.broker.batches.limits import BrokerLimits, BrokerState
from headrace.broker.batches.refusals import Refusals
from headrace.broker.batches.source import UNSEEN_AT_ONCE
from headrace.broker.reports.metrics import FleetMetrics
from headrace.broker.reports.worker_rows import MOST_BYTES_PER_S
from headrace.broker.sessions import waiting_ends
from headrace.broker.sessions.claims import (
    MOST_BROUGHT,
    MOST_FORGOTTEN,
    MOST_TOLD_REASONS,
    MOST_UNHEARD,
    STEPS_AT_ONCE,
    STEPS_PER_S,
)
from headrace.broker.sessions.core import BrokerCore
from headrace.broker.sessions.worker_sessions import UNHEARD_S
from headrace.schemas.accounts.ledger import HeldBatch, LedgerRow, Settled, WorkerTotals
from headrace.schemas.accounts.lifetime_counters import SAMPLED_BYTES, WORKER_WAIT
from headrace.schemas.accounts.redis_keys import labelled
from headrace.schemas.basics.bounds import MOST_REASONS
from headrace.schemas.chunks.batch import BatchHeader
from headrace.schemas.credentials.key_files import PeerKey
from headrace.schemas.messages import (
    Ack,
    Commit,
    Fenced,
    Heartbeat,
    LearnerHello,
    LearnerWelcome,
    Message,
    Obituary,
    Reject,
    Skip,
    SourcePosition,
    SupervisorHello,
    WeightsRefusal,
    WorkerHello,
    WorkerWelcome,
)
from support.simulation.even_batches import settled, totals, window
from support.thorough import schedules

FLEET, WORKER, LEARNER, SUPERVISOR, STRANGER = "fleet", b"w1", b"l1", b"w2", b"w3"
LIARS = 240
"""How many schedules with lying peers are played."""


class Broker:
    """A core with a worker in slot 0 that has shipped three batches, a learner that holds them, and a supervisor."""

    def __init__(self, state: BrokerState | None = None) -> None:
        self.now = 0.0
        self.core = BrokerCore(FLEET, BrokerLimits(), state)
        self.say(WORKER, hello())
        self.say(SUPERVISOR, SupervisorHello(fleet_id=FLEET, token="s"))
        self.say(LEARNER, LearnerHello(token="l", channel="stream"))
        for seq in (1, 2, 3):
            assert self.ship(seq)

    def say(self, peer: bytes, message: Message) -> list[Any]:
        """Return the core's answers to this peer."""
        self.core.receive(peer, message, self.now)
        return [send.content for send in self.core.take_outbox() if send.peer == peer]

    def ship(self, seq: int, nbytes: int = 1000, **changes: Any) -> bool:
        fields = {"steps": 10, "chunks": 2, "totals": totals(seq)} | changes
        header = BatchHeader(fleet_id=FLEET, slot=0, incarnation=1, seq=seq, **fields)
        return self.core.receive_batch(WORKER, header, [b""], nbytes, self.now)

    def books(self) -> object:
        return (self.core.rows(), self.core.state, self.core.store.steps)


def hello(**changes: Any) -> WorkerHello:
    return WorkerHello(**{"fleet_id": FLEET, "token": "t", "slot": 0, "incarnation": 1} | changes)


def beat(**changes: Any) -> Heartbeat:
    return Heartbeat(**{"slot": 0, "incarnation": 1, "totals": totals(3)} | changes)


def position(batches: int, **changes: Any) -> list[SourcePosition]:
    return [SourcePosition(slot=0, incarnation=1, settled=settled(batches).model_copy(update=changes))]


def obituary(batches: int, **changes: Any) -> Obituary:
    said = {"slot": 0, "incarnation": 1, "totals": totals(batches), "settled": Settled(), "window": window(1, batches)}
    return Obituary(**said | changes)


REASONS = [f"reason {i}" for i in range(MOST_TOLD_REASONS + 1)]

LIES: dict[str, tuple[bytes, Message, str]] = {
    "more reasons of discards than there are": (
        WORKER,
        beat(totals=totals(3, stepped=63, discarded=dict.fromkeys(REASONS, 1))),
        "33 reasons",
    ),
    "more reasons of drops than there are": (
        STRANGER,
        hello(slot=7, totals=totals(40), settled=Settled(seq=33, dropped=dict.fromkeys(REASONS, (1, 1)))),
        "33 reasons",
    ),
    "a jump of env steps": (WORKER, beat(totals=totals(3, env_steps=99_999_999)), "s allow"),
    "a jump of open steps": (WORKER, beat(totals=totals(3, stepped=99_999_999, open=99_999_969)), "s allow"),
    "failures without end": (WORKER, beat(totals=totals(3, env_failures=1 << 40)), "s allow"),
    "steps that do not add up": (WORKER, beat(totals=totals(3, stepped=31)), "31 steps, of which 30"),
    "steps of modules that do not add up": (
        WORKER,
        beat(totals=totals(3, module_steps={"a": 1})),
        "1 steps of modules",
    ),
    "shipped in no batch": (WORKER, beat(totals=totals(3, stepped=40, shipped=40)), "shipped by batch 3"),
    "a counter that goes back": (WORKER, hello(totals=totals(2)), "seq is 2; before it was 3"),
    "more batches than a window has": (WORKER, beat(totals=totals(3, seq=2000)), "2000 batches cut"),
    "weights of a learner to come": (WORKER, beat(weights=(1 << 30, 1)), "epoch 1073741824"),
    "refused weights of a learner to come": (
        WORKER,
        beat(refused=WeightsRefusal(version=(1 << 30, 1), detail="")),
        "epoch 1073741824",
    ),
    "lifetime counters without end": (WORKER, beat(counters={"episodes": {"a": 1 << 50}}), "episodes/a"),
    "a skip of other counts": (
        WORKER,
        Skip(slot=0, incarnation=1, batch=window(4, 4)[0], reason="poison", totals=totals(4, stepped=99, shipped=99)),
        "shipped by a batch",
    ),
    "an incarnation far away": (STRANGER, hello(token="x", incarnation=999_999_999), "is the highest known"),
    "steps before the first welcome": (STRANGER, hello(token="x", incarnation=2, totals=totals(5)), "life that begins"),
    "steps without an incarnation": (STRANGER, hello(slot=7, incarnation=0, totals=totals(5)), "life that begins"),
    "an incarnation without a slot": (STRANGER, hello(slot=None, incarnation=3), "of no slot"),
    "a life of ages": (
        STRANGER,
        hello(slot=7, totals=totals(1, stepped=1 << 46, discarded={"env_hang": (1 << 46) - 10})),
        "before this",
    ),
    "shipped before the first batch": (STRANGER, hello(slot=7, totals=totals(1, seq=0)), "in no batch"),
    "spaces that no learner can read": (STRANGER, hello(slot=7, spaces={"default_policy": {}}), "not a pair of spaces"),
    "more settled than cut": (STRANGER, hello(slot=7, totals=totals(5), settled=settled(6)), "6 batches settled of 5"),
    "more under way than a window has": (STRANGER, hello(slot=7, totals=totals(2000)), "may be under way"),
    "more settled than shipped": (
        STRANGER,
        hello(slot=7, totals=totals(5), settled=Settled(seq=4, committed=(51, 8))),
        "(51, 8) settled",
    ),
    "more settled than the broker knows": (WORKER, hello(totals=totals(3), settled=settled(3)), "broker knows of 0"),
    "a learner's epoch far away": (b"l2", LearnerHello(token="x", channel="stream", epoch=1 << 39), "learner epoch"),
    "a commit of what was not cut": (LEARNER, Commit(epoch=1, position=position(1 << 40)), "3 are cut"),
    "a commit of what has not come": (LEARNER, Commit(epoch=1, position=position(4)), "3 are cut"),
    "a commit of other counts": (LEARNER, Commit(epoch=1, position=position(3, committed=(9, 6))), "(9, 6) settled"),
    "a hold of what has not come": (
        LEARNER,
        LearnerHello(token="l", channel="stream", epoch=1, held={"0/1": [*window(1, 3), *window(9, 9)]}),
        "holds batch 9",
    ),
    "a hold of other counts": (
        LEARNER,
        LearnerHello(token="l", channel="stream", epoch=1, held={"0/1": [HeldBatch(seq=1, steps=1 << 31, chunks=2)]}),
        "holds batch 1",
    ),
    "an obituary of fewer batches than came": (SUPERVISOR, obituary(2), "seq is 2; before it was 3"),
    "an obituary of other counts": (
        SUPERVISOR,
        obituary(4, totals=totals(4, stepped=99, shipped=99)),
        "(40, 8) settled or in the window",
    ),
    "an obituary with a part of the window": (
        SUPERVISOR,
        obituary(4, totals=totals(4, stepped=99, shipped=99), window=window(4, 4)),
        "accepted and (10, 2) left",
    ),
    "an obituary of a life not known": (
        SUPERVISOR,
        obituary(4, slot=7, totals=totals(4, shipped_chunks=1 << 40)),
        "(40, 8) settled or in the window",
    ),
    "an obituary with a window beyond its end": (SUPERVISOR, obituary(3, window=window(1, 4)), "in the window, where"),
    "an obituary with a window twice": (SUPERVISOR, obituary(3, window=2 * window(3, 3)), "in the window, where"),
    "an obituary of more than was shipped": (
        SUPERVISOR,
        obituary(3, window=[*window(1, 2), HeldBatch(seq=3, steps=11, chunks=2)]),
        "settled or in the window",
    ),
    "an obituary of a life far away": (SUPERVISOR, obituary(0, incarnation=1 << 29), "is the highest known"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_counted_and_changes_no_books(name: str, caplog: pytest.LogCaptureFixture) -> None:
    peer, lie, words = LIES[name]
    broker = Broker(BrokerState(incarnations={0: 0}))
    before, refused = broker.books(), broker.core.refusals.total
    broker.say(peer, lie)
    assert broker.core.refusals.total == refused + 1
    assert any(words in record.getMessage() for record in caplog.records)
    broker.core.tick(broker.now + 1.0)
    assert broker.books() == before
    assert broker.ship(4), "the worker goes on"
    assert all(not list(row.problems()) for row in broker.core.rows())


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        (
            {"steps": 50_000, "totals": totals(4, stepped=50_030, shipped=50_030)},
            "50000 steps in a batch of 1000 bytes",
        ),
        ({"steps": 11}, "shipped by a batch"),
        ({"totals": totals(4, seq=5)}, "with the totals of batch 5"),
        ({"totals": totals(4, stepped=41)}, "41 steps"),
        ({"learner_epoch": 1 << 39}, "learner epoch"),
    ],
)
def test_a_batch_with_an_implausible_header_is_rejected_by_its_seq(lie: dict[str, Any], words: str) -> None:
    broker = Broker()
    before = broker.books()
    assert not broker.ship(4, **lie)
    (reject,) = [send.content for send in broker.core.take_outbox() if isinstance(send.content, Reject)]
    assert (reject.code, reject.seq, reject.fatal) == ("implausible", 4, False)
    assert words in reject.detail
    assert broker.books() == before
    assert broker.ship(4)


def test_reasons_of_a_liar_take_no_room_in_what_others_are_told() -> None:
    """It skips batches, each for another reason, and ends for one that does not exist."""
    broker = Broker()
    for seq in range(4, 4 + 2 * MOST_REASONS):
        skip = Skip(slot=0, incarnation=1, batch=window(seq, seq)[0], reason=f"reason {seq}", totals=totals(seq))
        broker.say(WORKER, skip)
    last = 3 + 2 * MOST_REASONS
    broker.say(LEARNER, Commit(epoch=1, position=position(3)))
    broker.core.tick(1.0)
    broker.say(SUPERVISOR, obituary(last, totals=totals(last, stepped=10 * last + 1, open=1), reason="boredom"))
    broker.core.tick(2.0)
    (row,) = broker.core.rows()
    assert row.totals.discarded == {"worker_killed": 1}
    assert {source.dropped for source in broker.core.sources[(0, 1)].held.values()} <= {"other"}
    assert LedgerRow.model_validate_json(row.model_dump_json()) == row


def test_counters_that_heartbeats_tell_grow_no_faster_than_time_allows() -> None:
    broker = Broker()
    source, lie = broker.core.sources[(0, 1)], beat(bytes_shipped=(1 << 47, 1 << 47), waited_s={"window": 1e9})
    for broker.now in (9.0, 99.0):
        broker.say(WORKER, lie)
        lived_s = int(broker.now) + 1
        counters = FleetMetrics(broker.core).counters_of(source, broker.now)
        assert counters[labelled(WORKER_WAIT, "reason", "window")] == lived_s
        assert counters[SAMPLED_BYTES] == lived_s * MOST_BYTES_PER_S
    broker.say(WORKER, beat(bytes_shipped=(7, 7), waited_s={"window": 1.0}))
    assert FleetMetrics(broker.core).counters_of(source, broker.now) == counters


def test_a_learner_settles_no_batch_that_this_broker_did_not_take() -> None:
    broker = Broker()
    broker.say(WORKER, beat(totals=totals(5)))
    broker.say(LEARNER, Commit(epoch=1, position=position(4)))
    assert broker.core.refusals.total == 1
    assert broker.core.sources[(0, 1)].settled.seq == 0


def test_a_repeated_commit_does_not_move_the_time_of_the_last_commit() -> None:
    broker = Broker()
    seen = []
    for broker.now, batches in ((1.0, 0), (5.0, 2), (9.0, 2), (12.0, 3)):
        broker.say(LEARNER, Commit(epoch=1, position=position(batches)))
        seen.append(broker.core.learners.lease.committed_at)
    assert seen == [1.0, 5.0, 5.0, 12.0]


def test_an_obituary_takes_back_no_batch_that_an_earlier_broker_took() -> None:
    core = BrokerCore(FLEET, BrokerLimits())
    core.receive(WORKER, hello(totals=totals(5), settled=settled(3)), 0.0)
    core.receive(SUPERVISOR, SupervisorHello(fleet_id=FLEET, token="s"), 0.0)
    core.receive(SUPERVISOR, obituary(2), 0.0)
    core.tick(60.0)
    assert not core.sources[(0, 1)].closed
    assert core.refusals.total == 1


def test_control_characters_of_a_peer_are_escaped_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    Refusals().note("a peer", "bad_message", "clear \x1b[2J\n")
    assert caplog.records[0].getMessage() == "refused a message of a peer: bad_message: clear \\x1b[2J\\n, 1 so far"


def test_the_log_has_one_line_for_a_peer_that_lies_many_times(caplog: pytest.LogCaptureFixture) -> None:
    broker = Broker()
    broker.say(WORKER, hello(host="far\x1b[2J", pid=77, totals=totals(3)))
    for _ in range(100):
        broker.say(WORKER, beat(totals=totals(3, env_steps=99_999_999)))
    lines = [record.getMessage() for record in caplog.records if "implausible Heartbeat" in record.getMessage()]
    assert len(lines) == 1
    assert broker.core.refusals.total == 100
    assert "worker 0 (incarnation 1, pid 77 on 'far\\x1b[2J')" in lines[0]


# -- what honest peers may mean ---------------------------------------------------------------------------------------


def test_a_worker_of_many_days_joins_a_broker_that_lost_its_state() -> None:
    """The learner knows which batches it settled, and reports them before the worker joins."""
    core = BrokerCore(FLEET, BrokerLimits())
    days, steps = 40_000_000, 10_000_000 * 86_400
    brought = WorkerTotals(seq=days, stepped=steps, shipped=steps, shipped_chunks=days)
    newest = Settled(seq=days - 1, committed=(steps - 10, days - 1))
    place = SourcePosition(slot=3, incarnation=57, settled=newest)
    held = {"3/57": [HeldBatch(seq=days, steps=10, chunks=1)]}
    core.receive(LEARNER, LearnerHello(token="l", channel="stream", epoch=37, position=[place], held=held), 0.0)
    assert core.sources == {}
    older = Settled(seq=days - 2, committed=(steps - 20, days - 2))
    back = hello(slot=3, incarnation=57, totals=brought, settled=older, weights=(37, 9000))
    core.receive(WORKER, back, 0.0)
    (welcome,) = [send.content for send in core.take_outbox() if isinstance(send.content, WorkerWelcome)]
    assert (welcome.accepted, welcome.settled) == (days - 1, newest)
    assert core.sources[(3, 57)].weights == (37, 9000), "what it waits for is judged by them"
    again = BatchHeader(
        fleet_id=FLEET, slot=3, incarnation=57, seq=days, steps=10, chunks=1, learner_epoch=37, totals=brought
    )
    assert core.receive_batch(WORKER, again, [b""], 1000, 1.0)
    assert core.store.queue.first() is None, "the learner has this batch already"
    assert core.refusals.total == 0


def test_a_learners_claim_that_no_worker_confirms_settles_no_batch() -> None:
    """A learner claims all of a life before its worker joins: the worker then joins for the first time."""
    core = BrokerCore(FLEET, BrokerLimits())
    position = SourcePosition(slot=0, incarnation=1, settled=settled(1 << 40))
    core.receive(LEARNER, LearnerHello(token="l", channel="stream", position=[position]), 0.0)
    core.receive(WORKER, hello(), 0.0)
    assert core.sources[(0, 1)].accepted == 0
    assert core.refusals.counts == {("the learner", "implausible position"): 1}


@pytest.mark.parametrize(("known", "most"), [(0, MOST_FORGOTTEN), (500, 500 + MOST_UNHEARD)])
def test_incarnations_and_epochs_may_run_ahead_only_to_a_limit(known: int, most: int) -> None:
    state = BrokerState(epoch=known, incarnations={0: known} if known else {})
    core = BrokerCore(FLEET, BrokerLimits(), state)
    core.receive(WORKER, hello(incarnation=most + 1), 0.0)
    core.receive(LEARNER, LearnerHello(token="l", channel="stream", epoch=most + 1), 0.0)
    codes = [send.content.code for send in core.take_outbox() if isinstance(send.content, Reject)]
    assert codes == ["implausible", "implausible"]
    core.receive(WORKER, hello(incarnation=most), 0.0)
    core.receive(LEARNER, LearnerHello(token="l", channel="stream", epoch=most), 0.0)
    answers = [type(send.content) for send in core.take_outbox()]
    assert WorkerWelcome in answers
    assert LearnerWelcome in answers


def test_incarnations_and_epochs_restored_from_redis_raise_the_limit() -> None:
    core = BrokerCore(FLEET, BrokerLimits())
    core.restore([], {0: 300_000}, 200_000)
    core.receive(WORKER, hello(incarnation=300_001), 0.0)
    core.receive(LEARNER, LearnerHello(token="l", channel="stream", epoch=200_001), 0.0)
    assert core.refusals.total == 0
    core.receive(STRANGER, hello(incarnation=300_000), 0.0)
    assert any(isinstance(send.content, Fenced) for send in core.take_outbox())


def test_the_limit_of_claimed_steps_grows_with_time() -> None:
    """A worker with wide vectors of envs, at a million steps a second, for a day."""
    broker = Broker()
    broker.now = 86_400.0
    most = 86_400 * 1_000_000
    broker.say(WORKER, beat(totals=totals(3, stepped=most, discarded={"env_hang": most - 30})))
    assert broker.core.refusals.total == 0
    assert broker.core.rows()[0].totals.stepped == most
    over = STEPS_AT_ONCE + STEPS_PER_S * 86_400 + 1
    broker.say(WORKER, beat(totals=totals(3, stepped=over, discarded={"env_hang": over - 30})))
    assert broker.core.refusals.total == 1


MUCH = 19_999_900
"""Steps that are not refused: the fastest worker may make them in two seconds."""

GOALS: dict[str, tuple[bytes, Message]] = {
    "env steps": (WORKER, beat(totals=totals(3, env_steps=MUCH))),
    "open steps": (WORKER, beat(totals=totals(3, stepped=MUCH + 30, open=MUCH))),
    "discarded steps": (WORKER, beat(totals=totals(3, stepped=MUCH + 30, discarded={"env_hang": MUCH}))),
    "a batch that exists no more": (
        WORKER,
        Skip(
            slot=0,
            incarnation=1,
            batch=HeldBatch(seq=4, steps=MUCH, chunks=1),
            reason="oversize",
            totals=totals(4, stepped=MUCH + 30, shipped=MUCH + 30, shipped_chunks=7),
        ),
    ),
    "an older life": (STRANGER, hello(slot=7, totals=WorkerTotals(env_steps=MOST_BROUGHT))),
    "the end of a life": (SUPERVISOR, obituary(0, slot=7, totals=WorkerTotals(env_steps=MOST_BROUGHT))),
}


@pytest.mark.parametrize("name", GOALS)
def test_no_claim_reaches_a_goal_of_steps(name: str) -> None:
    """Steps that no batch brought count only as far as the time and the batches make them plausible."""
    broker, (peer, lie) = Broker(), GOALS[name]
    broker.say(peer, lie)
    broker.core.tick(1.0)
    assert broker.core.refusals.total == 0, "the claim is not impossible"
    told_to_redis = sum(row.totals.steps_of_envs for row in broker.core.rows())
    assert 30 <= broker.core.store.steps <= told_to_redis <= 60 + UNSEEN_AT_ONCE
    assert not [problem for row in broker.core.rows() for problem in row.problems()]


def test_steps_that_no_batch_brought_count_once_they_are_plausible() -> None:
    """A worker whose envs fail discards most of its steps, and all of them count in the end."""
    broker = Broker()
    counted = []
    for seq, broker.now in enumerate((0.0, 1.0, 10.0), start=4):
        made = totals(seq, stepped=50_000 + 10 * seq, discarded={"env_crash": 50_000})
        assert broker.ship(seq, totals=made)
        counted.append(broker.core.store.steps)
    assert broker.core.refusals.total == 0
    assert counted[0] < counted[1] < counted[2] == 50_060


def test_all_steps_of_a_life_that_the_file_of_the_broker_knows_count() -> None:
    """Its broker restarted without Redis. What it was not welcomed to has counted before."""
    core = BrokerCore(FLEET, BrokerLimits(), BrokerState(incarnations={0: 1}))
    brought = totals(5_000_000, stepped=50_000_007, open=7)
    core.receive(WORKER, hello(totals=brought, settled=settled(4_999_999)), 0.0)
    header = BatchHeader(fleet_id=FLEET, slot=0, incarnation=1, seq=5_000_000, steps=10, chunks=2, totals=brought)
    assert core.receive_batch(WORKER, header, [b""], 1000, 0.0)
    assert core.store.steps == 50_000_007


@pytest.mark.long
@pytest.mark.parametrize(("name", "seeds"), schedules({"liars": LIARS}))
def test_no_lie_reaches_the_books_of_honest_peers_or_raises_in_the_core(name: str, seeds: range) -> None:
    said = sum((play_honestly(seed) for seed in seeds), Counter[str]())
    assert {"Heartbeat read", "Commit read", "BatchHeader read", "Obituary read", "WorkerHello read"} <= said.keys()


def test_a_worker_life_lost_with_its_machine_is_closed_with_its_last_totals() -> None:
    """The broker closes it only when a newer life has the slot."""
    broker = Broker()
    broker.now += 10_000.0
    broker.core.tick(broker.now)
    (row,) = broker.core.rows()
    assert not row.closed
    broker.say(STRANGER, hello(token="x", incarnation=2))
    broker.core.tick(broker.now + 1.0)
    row = min(broker.core.rows(), key=lambda row: row.incarnation)
    assert (row.closed, row.totals.stepped, row.accepted, [*row.problems()]) == (True, 30, (30, 6), [])


def test_what_only_an_earlier_learner_held_is_lost_with_its_worker() -> None:
    """The broker restarts, and then a learner comes that holds no batch: no peer has these any more."""
    broker = Broker()
    broker.core = BrokerCore(FLEET, BrokerLimits(), broker.core.state)
    broker.say(WORKER, hello(totals=totals(3)))
    broker.say(SUPERVISOR, SupervisorHello(fleet_id=FLEET, token="s"))
    broker.say(LEARNER, LearnerHello(token="l", channel="stream", epoch=1, held={"0/1": window(1, 3)}))
    broker.say(STRANGER, LearnerHello(token="x", channel="stream"))
    broker.say(SUPERVISOR, obituary(3))
    (row,) = broker.core.rows()
    assert (row.closed, row.held, row.lost, [*row.problems()]) == (True, (0, 0), {"worker_killed": (30, 6)}, [])


def test_an_obituary_within_a_minute_of_the_next_life_still_counts() -> None:
    broker = Broker()
    broker.say(STRANGER, hello(token="x", incarnation=2))
    broker.now += UNHEARD_S - 1.0
    broker.core.tick(broker.now)
    broker.say(SUPERVISOR, obituary(5, totals=totals(5, stepped=57, open=7)))
    broker.core.tick(broker.now + 1_000.0)
    row = min(broker.core.rows(), key=lambda row: row.incarnation)
    assert (row.closed, row.totals.stepped) == (True, 57)


@pytest.mark.parametrize("knows_from", ["the worker", "Redis"])
def test_a_life_whose_recorder_was_removed_is_closed_with_the_steps_that_it_had_told_of(
    knows_from: str, caplog: pytest.LogCaptureFixture
) -> None:
    broker = Broker()
    broker.say(WORKER, beat(totals=totals(3, stepped=37, open=7)))
    if knows_from == "Redis":
        rows = [*broker.core.rows()]
        broker.core = BrokerCore(FLEET, BrokerLimits())
        broker.core.restore(rows, {0: 1}, epoch=1)
        broker.say(SUPERVISOR, SupervisorHello(fleet_id=FLEET, token="s"))
    for _ in range(2):  # a supervisor repeats it
        broker.say(SUPERVISOR, obituary(0, totals=WorkerTotals(), window=[]))
    broker.say(LEARNER, LearnerHello(token="l", channel="stream"))
    broker.core.tick(broker.now + UNHEARD_S)
    (row,) = broker.core.rows()
    assert (row.closed, row.totals.stepped, [*row.problems()]) == (True, 37, [])
    assert row.totals.discarded == {"worker_killed": 7}
    assert caplog.text.count("its supervisor found no recorder of it: its books are closed with the 37 steps") == 1


def test_obituaries_that_wait_for_a_learner_take_bounded_memory_and_none_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A supervisor of one group cannot take the room of another. Refused ends are repeated after a learner joins."""
    monkeypatch.setattr(waiting_ends, "MOST_BYTES", 50_000)
    core = BrokerCore(FLEET, BrokerLimits(group="own"), BrokerState(owners={1: "gpu"}, incarnations={0: 100, 1: 100}))

    def say(peer: bytes, message: Message, role: str = "supervisor", group: str = "own") -> list[Any]:
        core.receive(peer, message, 0.0, PeerKey(role, group, b"key of " + peer))
        return [send.content for send in core.take_outbox()]

    for peer, group in ((b"own", "own"), (b"gpu", "gpu")):
        say(peer, SupervisorHello(fleet_id=FLEET, token=peer.decode()), group=group)
    end = Obituary(slot=0, incarnation=1, totals=WorkerTotals(), settled=Settled(), reason="worker_killed")
    ends = [end.model_copy(update={"incarnation": life}) for life in range(1, 101)]
    refused = [end for end in ends if say(b"own", end)]
    assert 50 < len(refused) < 100, "each of the ends that are kept gets no answer yet"
    (reject,) = say(b"own", refused[0])
    assert (reject.code, reject.fatal) == ("too_many_ends", False)
    assert say(b"own", ends[0]) == [], "an end that is kept may be repeated"
    assert say(b"gpu", ends[0].model_copy(update={"slot": 1}), group="gpu") == []
    learner = LearnerHello(token="l", channel="stream")
    closed = [said for said in say(b"learner", learner, "learner") if isinstance(said, Ack) and said.closed]
    assert len(closed) == len(ends) - len(refused) + 1
    assert all(any(isinstance(said, Ack) and said.closed for said in say(b"own", end)) for end in refused)


def test_a_life_lost_before_a_broker_restart_is_closed_by_the_next_broker() -> None:
    """The next broker knows the life from Redis only. For a minute its supervisor may report its end."""
    broker = Broker()
    rows = [*broker.core.rows()]
    broker.core = BrokerCore(FLEET, BrokerLimits())
    broker.core.restore(rows, {0: 2}, epoch=1)
    broker.say(LEARNER, LearnerHello(token="l", channel="stream"))
    broker.core.tick(broker.now)
    broker.core.tick(broker.now + UNHEARD_S - 1.0)
    assert not any(row.closed for row in broker.core.rows())
    broker.core.tick(broker.now + UNHEARD_S + 2.0)
    (row,) = broker.core.rows()
    assert (row.closed, row.totals.stepped, row.lost, [*row.problems()]) == (True, 30, {"worker_killed": (30, 6)}, [])


def test_a_learner_whose_welcome_was_lost_does_not_stall_the_schedule() -> None:
    """A learner whose epoch the broker raised did not hear of it when the WELCOME was lost."""
    assert play(5130)[0] == []
