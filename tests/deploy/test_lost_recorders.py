"""The books of a worker life without its recorder balance, however far Redis and the learner's checkpoint differ."""

from __future__ import annotations

import pytest

from headrace.broker.batches.limits import BrokerLimits, BrokerState
from headrace.broker.sessions.core import BrokerCore
from headrace.deploy.fleet.obituary_sender import proved_obituary
from headrace.schemas.accounts.ledger import Drop, LedgerRow, Settled, WorkerTotals
from headrace.schemas.messages import LearnerHello, SourcePosition, SupervisorHello

FLEET, LIFE = "fleet-t", (0, 3)
STEPS, CHUNKS = 32, 2
"""Steps and chunks of each batch."""


def settled(seq: int) -> Settled:
    return Settled(seq=seq, committed=(STEPS * seq, CHUNKS * seq))


def row(cut: int, done: int, open_steps: int, *, closed: bool = False, lost: int = 0) -> LedgerRow:
    """A life of which Redis was told when `cut` batches, but the `lost`, were accepted and `done` were committed."""
    shipped, taken = STEPS * cut, cut - lost
    totals = WorkerTotals(
        seq=cut,
        stepped=shipped + open_steps + 9,
        open=0 if closed else open_steps,
        shipped=shipped,
        shipped_chunks=CHUNKS * cut,
        discarded={"env_exception": 9 + (open_steps if closed else 0)},
        env_steps=shipped + open_steps + 9,
        module_steps={"default_policy": STEPS * taken},
    )
    held = (STEPS * (taken - done), CHUNKS * (taken - done))
    return LedgerRow(
        slot=LIFE[0],
        incarnation=LIFE[1],
        totals=totals,
        accepted=(STEPS * taken, CHUNKS * taken),
        held=held,
        settled=settled(done),
        lost={Drop.WORKER_KILLED: (STEPS * lost, CHUNKS * lost)} if lost else {},
        closed=closed,
    )


def close(stored: LedgerRow | None, position: int, *, learner_first: bool) -> LedgerRow:
    """Return what a new broker makes of the row, the obituary and the learner's position."""
    core = BrokerCore(FLEET, BrokerLimits(), BrokerState(epoch=1, incarnations={0: 3}), 0.0)
    core.restore([stored] if stored is not None else [], {0: 3}, 1)
    hello = LearnerHello(
        fleet_id=FLEET,
        token="learner",
        channel="stream",
        window_batches=8,
        window_bytes=1 << 20,
        position=[SourcePosition(slot=0, incarnation=3, settled=settled(position))],
    )
    obituary = proved_obituary(LIFE, stored, settled(position), Drop.BROKER_LOST)
    first, second = ((b"l", hello), (b"s", obituary))[:: 1 if learner_first else -1]
    core.receive(b"s", SupervisorHello(fleet_id=FLEET, token="supervisor"), 1.0)
    core.receive(*first, 1.0)
    core.receive(*second, 1.0)
    core.tick(2.0)
    (found,) = core.store.rows()
    return found


@pytest.mark.parametrize("learner_first", [True, False])
@pytest.mark.parametrize("position", [0, 5, 7, 8, 10, 11, 14])
@pytest.mark.parametrize(
    "stored",
    [row(10, 7, 50), row(10, 10, 0), row(10, 7, 50, closed=True), None],
    ids=["open episodes", "no open episode", "closed", "no row"],
)
def test_the_books_of_a_lost_life_are_closed_by_redis_and_the_learner(
    stored: LedgerRow | None, position: int, *, learner_first: bool
) -> None:
    found = close(stored, position, learner_first=learner_first)
    assert list(found.problems()) == []
    assert found.closed
    assert found.held == (0, 0)
    known = stored.settled.seq if stored is not None else 0
    assert found.settled == settled(max(position, known))
    assert found.totals.stepped >= (stored.totals.stepped if stored is not None else 0)
    assert found.totals.shipped == STEPS * max(position, 10 if stored is not None else 0)


@pytest.mark.parametrize("learner_first", [True, False])
@pytest.mark.parametrize("position", [0, 7, 8, 9])
def test_a_batch_that_a_lost_life_never_delivered_stays_lost(position: int, *, learner_first: bool) -> None:
    found = close(row(10, 7, 50, closed=True, lost=1), position, learner_first=learner_first)
    assert list(found.problems()) == []
    assert found.closed
    assert found.held == (0, 0)
    assert found.settled == settled(max(position, 7))
    assert found.totals.shipped == STEPS * 10
    assert sum(steps for steps, _ in found.lost.values()) == STEPS * (10 - max(position, 7))
