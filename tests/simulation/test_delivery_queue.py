"""The order in which the broker delivers batches, compared with a plain scan of the whole queue, and its cost."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.broker.batches.batch_store import BatchStore
from headrace.broker.batches.limits import BrokerLimits
from headrace.broker.batches.rounds import Rounds
from headrace.broker.batches.source import Source, StoredBatch
from headrace.schemas.accounts.ledger import HeldBatch, Settled, WorkerTotals
from headrace.schemas.chunks.batch import BatchHeader
from headrace.schemas.messages.message_base import SourcePosition

SLOTS, LEASE_S = 4, 2.0
News = tuple[Source, StoredBatch | None]


def _told(totals: WorkerTotals) -> BatchHeader:
    return BatchHeader(fleet_id="f", slot=0, incarnation=1, seq=totals.seq, steps=1, chunks=1, totals=totals)


class PlainScan:
    """The same queue as one list. Each hand-out looks through all of it."""

    def __init__(self, rounds: Rounds) -> None:
        self.rounds = rounds
        self.entries: list[tuple[Source, int]] = []

    def first(self) -> tuple[int, News] | None:
        """The place of the next news, and the news."""
        of_round: dict[int, tuple[int, News]] = {}
        waiting: set[tuple[int, int]] = set()
        for place, (source, seq) in enumerate(self.entries):
            held = source.held.get(seq)
            if source.key in waiting or (seq and (held is None or held.with_learner)):
                continue
            if held is None or not (self.rounds.active and self.rounds.has(source, held)):
                return place, (source, held)
            waiting.add(source.key)
            of_round[source.slot] = place, (source, held)
        if not of_round or not self.rounds.is_turn(slot := min(of_round)):
            return None
        return of_round[slot]

    def requeue(self, sources: list[Source]) -> None:
        waiting = [(held.arrival, held.seq, source) for source in sources for held in source.waiting()]
        self.entries = [(source, seq) for _, seq, source in sorted(waiting, key=lambda entry: entry[:2])]
        self.entries += [(source, 0) for source in sources if source.ended and source.end_due]


class Play:
    """A store and its twin, through the same random events."""

    def __init__(self, seed: int, overflow: bool) -> None:
        limits = BrokerLimits(
            synchronous=bool(seed % 4),
            lease_s=LEASE_S,
            max_held_bytes=40,
            overflow="drop_oldest" if overflow else "block",
        )
        self.random, self.now = random.Random(seed), 0.0
        self.store = BatchStore(limits)
        self.twin = PlainScan(self.store.rounds)
        self.lives = [self._life(slot, 1) for slot in range(SLOTS)]
        self.reconcile()

    def _life(self, slot: int, incarnation: int) -> Source:
        source = self.store.source(slot, incarnation)
        source.peer, source.introduced, source.num_envs, source.cut_steps = b"w", True, 1, 4
        return source

    def accept(self) -> None:
        source = self.random.choice(self.lives)
        epoch, seq = self.store.weights
        weights = self.random.choice([(epoch, seq), (epoch, seq), (epoch, seq), (epoch, 0), (epoch, max(0, seq - 1))])
        if source.ended:
            return
        number = source.accepted + 1
        held = StoredBatch(number, 2, 1, 10, [b""], 0, self.now, weights)
        self.store.accept(source, held, _told(WorkerTotals(seq=number, stepped=2 * number, shipped=2 * number)))
        if not held.with_learner:
            self.twin.entries.append((source, number))

    def end(self) -> None:
        source = self.random.choice(self.lives)
        if not source.ended:
            self.store.end(source, "worker_killed")
            self.twin.entries.append((source, 0))

    def follow(self) -> None:
        place = self.random.randrange(SLOTS)
        if self.lives[place].ended:
            self.lives[place] = self._life(place, self.lives[place].incarnation + 1)

    def publish(self) -> None:
        self.store.weights = (1, self.store.weights[1] + 1)
        self.advance()

    def advance(self) -> None:
        """Time may pass on the shares of the lives that ended."""
        self.now += self.random.choice([0.1, LEASE_S, 4 * LEASE_S])
        live = [source for source in self.lives if not source.ended]
        self.store.rounds.advance(self.store.weights, live, self.store.steps, self.now)

    def settle(self) -> None:
        """By what a learner, a worker or Redis tells, also of batches that were never handed out."""
        source = self.random.choice(self.lives)
        if source.held:
            upto = self.random.randint(source.settled.seq + 1, source.accepted)
            gone = 2 * upto, upto
            self.store.merge_settled(source, Settled(seq=upto, committed=gone))

    def hand_out(self) -> None:
        first = self.store.queue.first()
        if first is None:
            return
        expected = self.twin.first()
        assert expected is not None
        del self.twin.entries[expected[0]]
        self.store.queue.pop_first()
        if first[1] is not None:
            first[1].mark_given()

    def reconcile(self) -> None:
        """A learner connects and still has some of what it was given. It may sample in another way."""
        self.store.rounds.ask(self.random.random() < 0.5, self.random.choice([0, 8, 24]))
        in_hand = {
            f"{source.slot}/{source.incarnation}": [
                HeldBatch(seq=held.seq, steps=2, chunks=1)
                for held in source.held.values()
                if held.with_learner and self.random.random() < 0.5
            ]
            for source in self.store.sources.values()
        }
        self.store.reconcile([], in_hand)
        self.twin.requeue(list(self.store.sources.values()))

    def events(self) -> list[Callable[[], None]]:
        often = [self.accept] * 6 + [self.hand_out] * 5 + [self.publish, self.advance]
        return [*often, self.settle, self.end, self.follow, self.follow, self.reconcile]


@settings(max_examples=300)
@given(seed=st.integers(0, 1 << 32), overflow=st.booleans())
def test_the_queue_delivers_in_the_order_of_a_scan_of_the_whole_queue(seed: int, overflow: bool) -> None:
    play = Play(seed, overflow)
    for _ in range(80):
        play.random.choice(play.events())()
        expected = play.twin.first()
        assert play.store.queue.first() == (None if expected is None else expected[1])


def test_a_delivery_costs_the_same_for_every_length_of_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost is the number of batches inspected. A round has thousands where many workers ship small ones."""
    looks, has = [0], Rounds.has

    def counting(rounds: Rounds, source: Source, held: StoredBatch) -> bool:
        looks[0] += 1
        return has(rounds, source, held)

    monkeypatch.setattr(Rounds, "has", counting)
    store, workers, each = BatchStore(BrokerLimits(synchronous=True, lease_s=LEASE_S)), 200, 20
    sources = [store.source(slot, 1) for slot in range(workers)]
    for source in sources:
        source.introduced, source.cut_steps = True, each
    store.rounds.advance((1, 1), sources, 0, 0.0)
    for seq in range(1, each + 1):
        for source in reversed(sources):
            held = StoredBatch(seq, 1, 1, 1, [b""], 0, 0.0, (1, 1))
            store.accept(source, held, _told(WorkerTotals(seq=seq, stepped=seq)))
    order = []
    while (first := store.queue.first()) is not None:
        assert first[1] is not None
        order.append((first[0].slot, first[1].seq))
        store.queue.pop_first()
        first[1].mark_given()
    assert order == [(slot, seq) for slot in range(workers) for seq in range(1, each + 1)]
    assert looks[0] < 3 * workers * each


def test_a_position_that_a_commit_repeats_is_no_news() -> None:
    store = BatchStore(BrokerLimits())
    source = store.source(0, 1)
    store.accept(source, StoredBatch(1, 1, 1, 1, [b""], 0, 0.0, (1, 1)), _told(WorkerTotals(seq=1, stepped=1)))
    settled = SourcePosition(slot=0, incarnation=1, settled=Settled(seq=1, committed=(1, 1)))
    for settles in (True, False):
        store.changed.clear()
        store.unreported.clear()
        assert store.learn_position(settled) is settles
        assert (source.key in store.changed, source.key in store.unreported) == (settles, settles)


def test_without_a_learner_the_queue_forgets_dropped_batches() -> None:
    store = BatchStore(BrokerLimits(max_held_bytes=40, overflow="drop_oldest"))
    store.reconcile([], {})
    source = store.source(0, 1)
    for seq in range(1, 2001):
        store.accept(source, StoredBatch(seq, 1, 1, 10, [b""], 0, 0.0), _told(WorkerTotals(seq=seq, stepped=seq)))
    assert len(store.queue) == 4
    assert len(store.queue._in_order) < 100


def _accept(store: BatchStore, seq: int, weights: tuple[int, int], steps: int = 1) -> StoredBatch:
    source = store.source(0, 1)
    held = StoredBatch(seq, steps, 1, 10, [b""], 0, 0.0, weights)
    store.accept(source, held, _told(WorkerTotals(seq=seq, stepped=seq)))
    return held


def test_the_queue_drops_stale_batches_only_after_the_learner_reports_its_own() -> None:
    """Before that report no batch is dropped: a learner may have trained on it."""
    store = BatchStore(BrokerLimits(max_staleness=1))
    store.publish((1, 9))
    batches = [_accept(store, seq, (1, 1)) for seq in (1, 2, 3)]
    assert [held.dropped for held in batches] == ["", "", ""]
    store.reconcile([], {"0/1": [HeldBatch(seq=1, steps=1, chunks=1)]})
    assert [held.dropped for held in batches] == ["", "stale", "stale"]


@pytest.mark.parametrize(
    ("weights", "steps", "dropped"),
    [
        ((2, 3), 1, ""),
        ((2, 2), 1, "stale"),
        ((1, 5), 1, "stale"),  # five versions of epoch 1 and five of epoch 2: five behind
        ((1, 0), 0, ""),  # tells of ends of episodes only
        ((0, 0), 1, ""),  # random actions
        ((3, 1), 1, ""),  # newer than what this broker knows
    ],
)
def test_lag_counts_the_versions_published_since_the_batch(weights: tuple[int, int], steps: int, dropped: str) -> None:
    store = BatchStore(BrokerLimits(max_staleness=2))
    store.reconcile([], {})
    for version in [(1, 5), (2, 1), (2, 5)]:
        store.publish(version)
    assert _accept(store, 1, weights, steps).dropped == dropped


@pytest.mark.parametrize(("newest", "dropped"), [((2, 1), ""), ((2, 3), "stale")])
def test_the_lag_of_a_batch_keeps_counting_in_the_next_learner_epoch(newest: tuple[int, int], dropped: str) -> None:
    store = BatchStore(BrokerLimits(max_staleness=2))
    store.reconcile([], {})
    store.publish((1, 5))
    held = _accept(store, 1, (1, 5))
    store.publish(newest)
    assert held.dropped == dropped


@pytest.mark.parametrize("overflow", ["block", "drop_stale"])
def test_block_and_drop_stale_never_drop_fresh_batches(overflow: str) -> None:
    store = BatchStore(BrokerLimits(max_held_bytes=15, max_staleness=8, overflow=overflow))  # type: ignore[arg-type]
    store.reconcile([], {})
    assert [_accept(store, seq, (1, 1)).dropped for seq in (1, 2, 3)] == ["", "", ""]
