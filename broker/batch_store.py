"""All batches the broker answers for: held until settled, queued for the learner in order of arrival, dropped by name.

The order of a source's batches is never changed. What the learner was once given is its to settle; only what it was
never given may be dropped here, and only once a learner has said what earlier brokers gave it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from headrace.broker.limits import BrokerLimits
from headrace.broker.source import Source, StoredBatch
from headrace.schemas.ledger import Drop, LedgerRow, Settled, WorkerTotals
from headrace.schemas.messages import HeldBatch, SourcePosition, Version


class BatchStore:
    """Sources by (slot, incarnation), and the queue to the learner."""

    def __init__(self, limits: BrokerLimits) -> None:
        self.sources: dict[tuple[int, int], Source] = {}
        self.nbytes = 0
        self.steps = 0
        """Accepted from all sources ever, this broker's and those that Redis told of."""
        self.weights: Version = (0, 0)
        """The newest published; what staleness is measured against."""
        self.is_reconciled = False
        """A learner has said what it has, so that batches may be counted as lost and dropped."""
        self.changed: set[tuple[int, int]] = set()
        """Sources whose workers have something to be told."""
        self._queue: deque[tuple[Source, int]] = deque()
        self._droppable: deque[tuple[Source, int]] = deque()
        """What the overflow policy may yet drop, oldest first, and some that it no longer may."""
        self._limits = limits
        self._arrivals = 0

    def source(self, slot: int, incarnation: int) -> Source:
        """The source of this name, new if need be."""
        return self.sources.setdefault((slot, incarnation), Source(slot, incarnation))

    # -- in -----------------------------------------------------------------------------------------------------------

    def accept(self, source: Source, held: StoredBatch, totals: WorkerTotals) -> None:
        """Take the next batch of a source."""
        self._arrivals += 1
        held.arrival = self._arrivals
        source.accept(held, totals)
        self.nbytes += held.nbytes
        if not held.with_learner:
            self._queue.append((source, held.seq))
            self._make_room(source, held)
        self._fold(source)

    def learn(self, source: Source, settled: Settled) -> None:
        """Take over a longer history of a source, from whoever tells it."""
        for held in source.learn_settled(settled):
            self.nbytes -= held.nbytes
        self._fold(source)

    def end(self, source: Source, reason: str) -> None:
        """Nothing more comes from this source; the learner hears of it after its last batch."""
        if source.end_reason in ("", reason):
            source.end_reason, source.end_due = reason, True
            self._count(source)
            self._queue.append((source, 0))

    def _count(self, source: Source) -> None:
        self.steps += source.steps - source.counted
        source.counted = source.steps

    def _fold(self, source: Source) -> None:
        self._count(source)
        if self.is_reconciled:
            source.fold_dropped()
        self.changed.add(source.key)

    # -- out ----------------------------------------------------------------------------------------------------------

    def first(self) -> tuple[Source, StoredBatch | None] | None:
        """What the learner is to hear of next: a batch, or (None) that a source has ended."""
        while self._queue:
            source, seq = self._queue[0]
            held = source.held.get(seq)
            if seq == 0 or (held is not None and not held.with_learner):
                return source, held
            self._queue.popleft()
        return None

    def pop_first(self) -> None:
        """`first` has been told."""
        self._queue.popleft()

    def reconcile(self, positions: Iterable[SourcePosition], in_hand: dict[str, list[HeldBatch]]) -> None:
        """A learner says what it has settled and what it has in hand; the rest is queued again in order of arrival."""
        for source in self.sources.values():
            source.with_learner.clear()
            for held in source.held.values():
                held.with_learner = False
        for key, batches in in_hand.items():
            slot, _, incarnation = key.partition("/")
            self._leave_with_learner(self.source(int(slot), int(incarnation)), batches)
        self.is_reconciled = True
        for position in positions:
            self.learn(self.source(position.slot, position.incarnation), position.settled)
        for source in self.sources.values():
            self._fold(source)
        self._requeue()

    def _leave_with_learner(self, source: Source, batches: list[HeldBatch]) -> None:
        for batch in batches:
            if batch.seq in source.held:
                source.held[batch.seq].give()
            elif batch.seq > source.accepted:
                source.with_learner[batch.seq] = batch

    def _requeue(self) -> None:
        waiting = [(held.arrival, source, held.seq) for source in self.sources.values() for held in source.waiting()]
        waiting.sort(key=lambda entry: (entry[0], entry[2]))
        self._queue = deque((source, seq) for _, source, seq in waiting)
        self._queue.extend((source, 0) for source in self.sources.values() if source.ended and source.end_due)

    def forget_ends(self) -> None:
        """A new learner knows no open episode of sources that ended before and left nothing."""
        for source in self.sources.values():
            source.end_due = source.end_due and bool(source.held)

    # -- dropping -----------------------------------------------------------------------------------------------------

    def drop_stale(self) -> None:
        """Where the policy says so, drop what was sampled under weights too many versions behind the newest."""
        if self._limits.overflow == "drop_stale" and self.is_reconciled:
            for source, seq in list(self._droppable):
                held = source.held.get(seq)
                if held is not None and _may_be_dropped(held) and self._is_stale(held):
                    self._drop(source, held, Drop.STALE)

    def _is_stale(self, held: StoredBatch) -> bool:
        """Too far behind the newest weights known here, of which a restarted broker may know none yet. (0, 0) is random
        actions, which are as old as they want to be."""
        if held.weights == (0, 0) or held.weights >= self.weights:
            return False
        epoch, seq = self.weights
        return held.weights[0] != epoch or held.weights[1] < seq - self._limits.max_staleness

    def _make_room(self, source: Source, newest: StoredBatch) -> None:
        """Apply the overflow policy to what was just accepted and what waits before it; `newest` is never overflow."""
        if self._limits.overflow == "block":
            return
        self._droppable.append((source, newest.seq))
        oldest = self._oldest_droppable()
        if not self.is_reconciled:
            return
        if self._limits.overflow == "drop_stale" and _may_be_dropped(newest) and self._is_stale(newest):
            self._drop(source, newest, Drop.STALE)
        while self.nbytes > self._limits.max_held_bytes and oldest is not None and oldest[1] is not newest:
            self._drop(*oldest, Drop.OVERFLOW)
            oldest = self._oldest_droppable()
        self.first()  # lets go of the queue's entries for what is gone, also while there is no learner to deliver to

    def _oldest_droppable(self) -> tuple[Source, StoredBatch] | None:
        while self._droppable:
            source, seq = self._droppable[0]
            held = source.held.get(seq)
            if held is not None and _may_be_dropped(held):
                return source, held
            self._droppable.popleft()
        return None

    def _drop(self, source: Source, held: StoredBatch, reason: str) -> None:
        held.dropped, held.frames = reason, None
        self.nbytes -= held.nbytes
        held.nbytes = 0
        self._fold(source)

    # -- the books ----------------------------------------------------------------------------------------------------

    def rows(self) -> list[LedgerRow]:
        """The books of every incarnation known, each as of one consistent moment."""
        rows = (source.ledger_row() for source in self.sources.values())
        return [row for row in rows if row is not None]

    def sent_and_unsettled(self) -> int:
        """Batches and gaps the learner was told of and has not committed."""
        return sum(held.with_learner for source in self.sources.values() for held in source.held.values())

    def held_batches(self) -> int:
        """Batches accepted and not settled."""
        return sum(len(source.held) for source in self.sources.values())

    def oldest_held_at(self) -> float | None:
        """When the oldest unsettled batch was accepted."""
        return min((held.at for source in self.sources.values() for held in source.held.values()), default=None)


def _may_be_dropped(held: StoredBatch) -> bool:
    """Nobody has it: a learner that was once given a batch may have trained on it."""
    return not held.handed and not held.dropped
