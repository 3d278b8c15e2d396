"""The seam of the broker's core: what an observer hears of batches, sources, weights, rows and time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.broker.batches.broker_observer import BrokerObserver
from headrace.broker.batches.limits import BrokerLimits
from headrace.broker.batches.source import Source, StoredBatch
from headrace.broker.sessions.core import BrokerCore
from headrace.schemas.accounts.ledger import HeldBatch, Settled, WorkerTotals
from headrace.schemas.basics.bounds import Version
from headrace.schemas.chunks.batch import BatchHeader
from headrace.schemas.messages import (
    Bye,
    Commit,
    Heartbeat,
    LearnerHello,
    LearnerRow,
    LearnerRows,
    Obituary,
    Skip,
    SourcePosition,
    SupervisorHello,
    WorkerHello,
)

Heard = tuple[str, int, int]
"""(hook, slot, number of the batch)."""

WORKER, LEARNER, PUBLISHER, SUPERVISOR = b"w", b"l", b"p", b"s"


class Witness(BrokerObserver):
    """Notes what it hears, in order."""

    def __init__(self) -> None:
        self.heard: list[Heard] = []
        self.rows: list[int] = []
        self.beats: list[Version | None] = []
        self.ticks: list[float] = []

    def accepted(self, source: Source, held: StoredBatch, told: BatchHeader | Skip) -> None:
        assert source.accepted == held.seq, "the books have it already"
        self.heard.append(("accepted", source.slot, held.seq))

    def settled(self, source: Source, batches: Sequence[StoredBatch], before: Settled) -> None:
        assert batches
        assert before.seq < source.settled.seq
        self.heard += [("settled", source.slot, held.seq) for held in batches]

    def ended(self, source: Source) -> None:
        assert source.ended
        self.heard.append(("ended", source.slot, source.incarnation))

    def reported(self, source: Source) -> None:
        self.beats.append(source.figures.beat.tasks)

    def logged(self, rows: Sequence[LearnerRow]) -> None:
        self.rows += [row.number for row in rows]

    def tick(self, now: float) -> None:
        self.ticks.append(now)


class Fleet:
    """A core with a witness, a worker in slot 0 and a learner."""

    def __init__(self, **limits: object) -> None:
        self.core, self.witness = BrokerCore("f", BrokerLimits(**limits)), Witness()  # type: ignore[arg-type]
        self.core.observers.append(self.witness)
        self.core.receive(WORKER, WorkerHello(fleet_id="f", token="w", slot=0, incarnation=1), 0.0)
        self.core.receive(LEARNER, LearnerHello(token="l", channel="stream"), 0.0)
        self.core.receive(PUBLISHER, LearnerHello(token="l", channel="publisher"), 0.0)

    def ship(self, seq: int) -> bool:
        header = BatchHeader(
            fleet_id="f", slot=0, incarnation=1, seq=seq, steps=10, chunks=1, totals=_totals(seq), weights_seq=1
        )
        return self.core.receive_batch(WORKER, header, [b""], 100, 0.0)

    def commit(self, seq: int) -> None:
        position = SourcePosition(slot=0, incarnation=1, settled=Settled(seq=seq, committed=(10 * seq, seq)))
        self.core.receive(LEARNER, Commit(epoch=1, position=[position], consumed_batches=seq), 0.0)


def _totals(seq: int) -> WorkerTotals:
    return WorkerTotals(seq=seq, stepped=10 * seq, shipped=10 * seq, shipped_chunks=seq)


def test_an_observer_hears_each_accepted_batch_once_and_no_refused_one() -> None:
    fleet = Fleet()
    assert [fleet.ship(seq) for seq in (1, 2, 2, 4, 1, 3)] == [True, True, False, False, False, True]
    assert fleet.witness.heard == [("accepted", 0, 1), ("accepted", 0, 2), ("accepted", 0, 3)]


def test_an_observer_hears_each_settled_batch_once_after_its_acceptance() -> None:
    fleet = Fleet()
    for seq in (1, 2, 3):
        fleet.ship(seq)
    for seq in (1, 1, 3, 2):
        fleet.commit(seq)
    assert fleet.witness.heard[3:] == [("settled", 0, 1), ("settled", 0, 2), ("settled", 0, 3)]


def test_a_skip_that_no_learner_settles_is_heard_as_accepted_and_then_as_settled() -> None:
    fleet = Fleet()
    skip = Skip(slot=0, incarnation=1, batch=HeldBatch(seq=1, steps=10, chunks=1), reason="poison", totals=_totals(1))
    for _ in range(2):
        fleet.core.receive(WORKER, skip, 0.0)
    assert fleet.witness.heard == [("accepted", 0, 1), ("settled", 0, 1)]


def test_a_batch_that_is_stale_at_once_is_heard_as_accepted_and_then_as_settled() -> None:
    fleet = Fleet(max_staleness=1)
    for version in ((1, 1), (1, 9)):
        fleet.core.published(version, 0.0)
    assert fleet.ship(1)
    assert fleet.witness.heard == [("accepted", 0, 1), ("settled", 0, 1)]
    assert fleet.core.sources[0, 1].settled.dropped == {"stale": (10, 1)}


@pytest.mark.parametrize("by_supervisor", [False, True])
def test_an_observer_hears_the_end_of_each_source_once(by_supervisor: bool) -> None:
    fleet = Fleet()
    fleet.ship(1)
    fleet.core.receive(SUPERVISOR, SupervisorHello(fleet_id="f", token="s"), 0.0)
    left: dict[str, Any] = {
        "slot": 0,
        "incarnation": 1,
        "totals": _totals(1),
        "settled": Settled(),
        "window": [HeldBatch(seq=1, steps=10, chunks=1)],
    }
    for _ in range(2):
        if by_supervisor:
            fleet.core.receive(SUPERVISOR, Obituary(**left), 1.0)
        else:
            fleet.core.receive(WORKER, Bye(**left), 1.0)
    fleet.core.receive(SUPERVISOR, Obituary(**left), 2.0)
    fleet.core.receive(b"w2", WorkerHello(fleet_id="f", token="w2", slot=0, incarnation=2), 3.0)
    fleet.core.tick(1000.0)
    assert fleet.witness.heard == [("accepted", 0, 1), ("ended", 0, 1)]


def test_a_superseded_source_ends_once_when_its_end_is_told_or_its_time_is_over() -> None:
    fleet = Fleet()
    fleet.core.receive(b"w2", WorkerHello(fleet_id="f", token="w2", slot=0, incarnation=2), 1.0)
    assert fleet.witness.heard == [], "its supervisor may tell what it left"
    for now in (1.0, 1000.0, 2000.0):
        fleet.core.tick(now)
    assert fleet.witness.heard == [("ended", 0, 1)]


def test_an_observer_hears_each_row_of_the_lease_holder_once() -> None:
    fleet = Fleet()
    rows = [LearnerRow(epoch=1, number=number, values={"loss": 1.0}) for number in (1, 2, 3)]
    for peer, told in ((PUBLISHER, rows[:2]), (PUBLISHER, rows), (b"stranger", rows), (WORKER, rows)):
        fleet.core.learners.on_rows(peer, LearnerRows(epoch=1, rows=told))
    assert fleet.witness.rows == [1, 2, 3]


def test_an_observer_hears_each_heartbeat_of_a_worker_that_is_known() -> None:
    fleet, beat = Fleet(), Heartbeat(slot=0, incarnation=1, totals=_totals(0), tasks=(1, 2))
    for peer in (WORKER, b"stranger", WORKER):
        fleet.core.receive(peer, beat, 0.0)
    assert fleet.witness.beats == [(1, 2), (1, 2)]


def test_observers_hear_time_and_one_that_overrides_nothing_is_an_observer() -> None:
    fleet = Fleet()
    fleet.core.observers.insert(0, BrokerObserver())
    fleet.ship(1)
    fleet.commit(1)
    fleet.core.receive(WORKER, Bye(slot=0, incarnation=1, totals=_totals(1), settled=Settled()), 1.0)
    fleet.core.tick(2.0)
    assert fleet.witness.ticks == [2.0]
    assert [hook for hook, _, _ in fleet.witness.heard] == ["accepted", "settled", "ended"]


def test_every_hook_is_called_by_the_broker(root: Path) -> None:
    """A hook that nothing calls would be a feature that never works."""
    code = "".join(path.read_text() for path in (root / "broker").rglob("*.py"))
    hooks = [name for name in vars(BrokerObserver) if not name.startswith("_")]
    assert hooks == ["accepted", "settled", "ended", "reported", "published", "logged", "tick", "close"]
    assert [name for name in hooks if f"observer.{name}(" not in code] == []
