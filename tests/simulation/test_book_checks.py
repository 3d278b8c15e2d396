"""Counts that do not add up, told to the broker's core: each is refused and counted, and changes no books."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from simulation.fuzz import play, play_honestly

from headrace.broker.batches.limits import BrokerLimits, BrokerState
from headrace.broker.batches.refusals import Refusals
from headrace.broker.sessions.core import BrokerCore
from headrace.broker.sessions.worker_sessions import UNHEARD_S
from headrace.schemas.accounts.ledger import HeldBatch, LedgerRow, Settled, WorkerTotals
from headrace.schemas.basics.bounds import MOST_EPOCH, MOST_LIVES, MOST_REASONS
from headrace.schemas.chunks.batch import BatchHeader
from headrace.schemas.messages import (
    Commit,
    Fenced,
    Heartbeat,
    LearnerHello,
    Message,
    Obituary,
    Reject,
    Skip,
    SourcePosition,
    SupervisorHello,
    Tasks,
    WorkerHello,
    WorkerWelcome,
)
from support.simulation.even_batches import settled, totals, window
from support.thorough import schedules

FLEET, WORKER, LEARNER, SUPERVISOR, STRANGER = "fleet", b"w1", b"l1", b"w2", b"w3"


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


WRONG: dict[str, tuple[bytes, Message, str]] = {
    "steps that do not add up": (WORKER, beat(totals=totals(3, stepped=31)), "31 steps, of which 30"),
    "steps of modules that do not add up": (
        WORKER,
        beat(totals=totals(3, module_steps={"a": 1})),
        "1 steps of modules",
    ),
    "spaces that no learner can read": (STRANGER, hello(slot=7, spaces={"default_policy": {}}), "not a pair of spaces"),
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
    "the last incarnation": (STRANGER, hello(token="x", incarnation=MOST_LIVES), "later ones need room"),
    "the end of the last incarnation": (SUPERVISOR, obituary(0, incarnation=MOST_LIVES), "later ones need room"),
    "the last epoch": (b"l2", LearnerHello(token="x", channel="stream", epoch=MOST_EPOCH), "later ones need room"),
    "weights of the last epoch": (WORKER, beat(weights=(MOST_EPOCH, 1)), "later ones need room"),
    "tasks of the last epoch": (b"t", Tasks(version=(MOST_EPOCH, 1)), "later ones need room"),
    "tasks of the last epoch in use": (WORKER, beat(tasks=(MOST_EPOCH, 1)), "later ones need room"),
    "a skip with the totals of another batch": (
        WORKER,
        Skip(slot=0, incarnation=1, batch=window(4, 4)[0], reason="poison", totals=totals(5)),
        "with the totals of batch 5",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_counts_that_do_not_add_up_are_refused_and_change_no_books(name: str, caplog: pytest.LogCaptureFixture) -> None:
    peer, message, words = WRONG[name]
    broker = Broker(BrokerState(incarnations={0: 0}))
    before, refused = broker.books(), broker.core.refusals.total
    broker.say(peer, message)
    assert broker.core.refusals.total == refused + 1
    assert any(words in record.getMessage() for record in caplog.records)
    broker.core.tick(broker.now + 1.0)
    assert broker.books() == before
    assert broker.ship(4), "the worker goes on"
    assert all(not list(row.problems()) for row in broker.core.rows())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"totals": totals(4, seq=5)}, "with the totals of batch 5"),
        ({"totals": totals(4, stepped=41)}, "41 steps"),
    ],
)
def test_a_batch_whose_totals_are_wrong_is_rejected_by_its_seq(changes: dict[str, Any], words: str) -> None:
    broker = Broker()
    before = broker.books()
    assert not broker.ship(4, **changes)
    (reject,) = [send.content for send in broker.core.take_outbox() if isinstance(send.content, Reject)]
    assert (reject.code, reject.seq, reject.fatal) == ("implausible", 4, False)
    assert words in reject.detail
    assert broker.books() == before
    assert broker.ship(4)


def test_reasons_that_this_version_does_not_know_are_counted_together() -> None:
    """A newer worker skips batches for other reasons, and ends for another one."""
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


def test_a_repeated_commit_does_not_move_the_time_of_the_last_commit() -> None:
    broker = Broker()
    seen = []
    for broker.now, batches in ((1.0, 0), (5.0, 2), (9.0, 2), (12.0, 3)):
        broker.say(LEARNER, Commit(epoch=1, position=position(batches)))
        seen.append(broker.core.learners.lease.committed_at)
    assert seen == [1.0, 5.0, 5.0, 12.0]


@pytest.mark.parametrize("restarted", [False, True])
def test_the_end_of_a_life_whose_recorder_is_older_than_what_it_told_closes_its_books(*, restarted: bool) -> None:
    """Its machine lost its power before the recorder's newest pages were on the disk."""
    broker = Broker()
    broker.say(WORKER, beat(totals=totals(5)))
    if restarted:
        broker.core = BrokerCore(FLEET, BrokerLimits())
        broker.say(WORKER, hello(totals=totals(5), settled=settled(3)))
        broker.say(SUPERVISOR, SupervisorHello(fleet_id=FLEET, token="s"))
        broker.say(LEARNER, LearnerHello(token="l", channel="stream"))
    broker.say(SUPERVISOR, obituary(2))
    (row,) = broker.core.rows()
    assert (row.closed, row.totals.stepped, row.accepted, [*row.problems()]) == (True, 50, (30, 6), [])
    assert row.lost == {"worker_killed": (20, 4)}
    assert broker.core.refusals.total == 0


def test_control_characters_of_a_peer_are_escaped_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    Refusals().note("a peer", "bad_message", "clear \x1b[2J\n")
    assert caplog.records[0].getMessage() == "refused a message of a peer: bad_message: clear \\x1b[2J\\n, 1 so far"


def test_the_log_has_one_line_for_a_peer_that_is_wrong_many_times(caplog: pytest.LogCaptureFixture) -> None:
    broker = Broker()
    broker.say(WORKER, hello(host="far\x1b[2J", pid=77, totals=totals(3)))
    for _ in range(100):
        broker.say(WORKER, beat(totals=totals(3, stepped=31)))
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


def test_a_life_older_than_the_newest_that_redis_knows_is_fenced() -> None:
    core = BrokerCore(FLEET, BrokerLimits())
    core.restore([], {0: 300_000}, 200_000)
    core.receive(WORKER, hello(incarnation=300_001), 0.0)
    core.receive(LEARNER, LearnerHello(token="l", channel="stream", epoch=200_001), 0.0)
    assert core.refusals.total == 0
    core.receive(STRANGER, hello(incarnation=300_000), 0.0)
    assert any(isinstance(send.content, Fenced) for send in core.take_outbox())


def test_all_steps_that_a_life_brings_to_a_restarted_broker_count() -> None:
    core = BrokerCore(FLEET, BrokerLimits())
    brought = totals(5_000_000, stepped=50_000_007, open=7)
    core.receive(WORKER, hello(totals=brought, settled=settled(4_999_999)), 0.0)
    header = BatchHeader(fleet_id=FLEET, slot=0, incarnation=1, seq=5_000_000, steps=10, chunks=2, totals=brought)
    assert core.receive_batch(WORKER, header, [b""], 1000, 0.0)
    assert core.store.steps == 50_000_007


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


@pytest.mark.long
@pytest.mark.parametrize(("name", "seeds"), schedules({"strangers": 60}))
def test_no_message_of_a_stranger_reaches_the_books_of_honest_peers_or_raises_in_the_core(
    name: str, seeds: range
) -> None:
    said = sum((play_honestly(seed) for seed in seeds), Counter[str]())
    assert {"Heartbeat read", "Commit read", "BatchHeader read", "Obituary read"} <= said.keys()
