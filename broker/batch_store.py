"""The store of all batches that the broker is responsible for.

It holds a batch until it is settled, queues it for the learner in order of arrival, and drops it only for a named
reason. The order of a source's batches never changes. The learner settles every batch that it was once given. The store
drops only batches that no learner was given, and only once a learner has said what earlier brokers gave it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from headrace.broker.delivery_queue import DeliveryQueue
from headrace.broker.limits import BrokerLimits
from headrace.broker.rounds import Rounds
from headrace.broker.source import Source, StoredBatch
from headrace.schemas.ledger import Drop, LedgerRow, Settled, WorkerTotals
from headrace.schemas.messages import HeldBatch, SourcePosition, Version


class BatchStore:
    """Sources by (slot, incarnation), and the queue to the learner."""

    def __init__(self, limits: BrokerLimits) -> None:
        self.sources: dict[tuple[int, int], Source] = {}
        self.nbytes = 0
        self.steps = 0
        """Env steps of all sources ever: those of this broker, and those that Redis knew."""
        self.weights: Version = (0, 0)
        """The newest published version, against which staleness is measured."""
        self.is_reconciled = False
        """True once a learner has said which batches it has. Before that no batch may be counted as lost or dropped."""
        self.window_steps = 0
        """Steps that the learner wants under way in the whole fleet; 0: no such limit."""
        self.changed: set[tuple[int, int]] = set()
        """Sources whose workers must get an Ack."""
        self._droppable: deque[tuple[Source, int]] = deque()
        """Candidates for the overflow policy, oldest first. It skips those that it may no longer drop."""
        self.rounds = Rounds(limits.synchronous, limits.workers, limits.lease_s, limits.max_env_steps)
        self._queue = DeliveryQueue(self.rounds)
        self._limits = limits
        self._arrivals = 0

    def source(self, slot: int, incarnation: int) -> Source:
        """Return the source of this slot and incarnation, a new one if there is none."""
        return self.sources.setdefault((slot, incarnation), Source(slot, incarnation))

    # -- in -----------------------------------------------------------------------------------------------------------

    def accept(self, source: Source, held: StoredBatch, totals: WorkerTotals) -> None:
        """Take the next batch of a source."""
        self._arrivals += 1
        held.arrival = self._arrivals
        source.accept(held, totals)
        self.nbytes += held.nbytes
        self.rounds.note(source, held)
        if not held.with_learner:
            self._queue.add(source, held.seq)
            self._make_room(source, held)
        self._note_progress(source)

    def merge_settled(self, source: Source, settled: Settled) -> None:
        """Take over a longer history of a source, whether a learner, a worker or Redis tells it."""
        for held in source.learn_settled(settled):
            self.nbytes -= held.nbytes
        self._note_progress(source)

    def end(self, source: Source, reason: str) -> None:
        """End a source: no more batches come from it. The learner is told after the source's last batch."""
        if source.end_reason in ("", reason):
            source.end_reason, source.end_due = reason, True
            if reason == Drop.SHUTDOWN:
                self.rounds.forget(source)
            self._count(source)
            self._queue.add(source, 0)

    def _count(self, source: Source) -> None:
        self.steps += source.steps - source.counted
        source.counted = source.steps

    def _note_progress(self, source: Source) -> None:
        self._count(source)
        if self.is_reconciled:
            source.settle_dropped()
        self._queue.refresh(source)
        self.changed.add(source.key)

    def limit_window(self, steps: int) -> None:
        """Note how many steps the learner wants under way. Workers hear of a large change at once, else soon."""
        if not steps or not self.window_steps or abs(steps - self.window_steps) > self.window_steps // 4:
            self.changed.update(key for key, source in self.sources.items() if source.peer is not None)
        self.window_steps = steps

    # -- out ----------------------------------------------------------------------------------------------------------

    def first(self) -> tuple[Source, StoredBatch | None] | None:
        """Return the next news for the learner: a batch, or (None) that a source has ended."""
        return self._queue.first()

    def pop_first(self) -> None:
        """Remove the entry that `first` returned, once the learner was told."""
        self._queue.pop_first()

    def reconcile(self, positions: Iterable[SourcePosition], in_hand: dict[str, list[HeldBatch]]) -> None:
        """Take over which batches a learner has settled and which it holds; queue the others again by arrival."""
        for source in self.sources.values():
            source.with_learner.clear()
            for held in source.held.values():
                held.with_learner = False
        for key, batches in in_hand.items():
            slot, _, incarnation = key.partition("/")
            self._leave_with_learner(self.source(int(slot), int(incarnation)), batches)
        self.is_reconciled = True
        for position in positions:
            self.merge_settled(self.source(position.slot, position.incarnation), position.settled)
        for source in self.sources.values():
            self._note_progress(source)
        self._requeue()

    def _leave_with_learner(self, source: Source, batches: list[HeldBatch]) -> None:
        for batch in batches:
            if batch.seq in source.held:
                source.held[batch.seq].mark_given()
            elif batch.seq > source.accepted:
                source.with_learner[batch.seq] = batch

    def _requeue(self) -> None:
        waiting = [(held.arrival, source, held.seq) for source in self.sources.values() for held in source.waiting()]
        waiting.sort(key=lambda entry: (entry[0], entry[2]))
        self._queue = DeliveryQueue(self.rounds)
        for _, source, seq in waiting:
            self._queue.add(source, seq)
        for source in self.sources.values():
            if source.ended and source.end_due:
                self._queue.add(source, 0)

    def forget_ends(self) -> None:
        """Cancel the ends due for sources that left no batch: a new learner knows no open episode of theirs."""
        for source in self.sources.values():
            source.end_due = source.end_due and bool(source.held)

    # -- dropping -----------------------------------------------------------------------------------------------------

    def drop_stale(self) -> None:
        """With the policy `drop_stale`, drop batches whose weights are too many versions behind the newest."""
        if self._limits.overflow == "drop_stale" and self.is_reconciled:
            for source, seq in list(self._droppable):
                held = source.held.get(seq)
                if held is not None and _may_be_dropped(held) and self._is_stale(held):
                    self._drop(source, held, Drop.STALE)

    def _is_stale(self, held: StoredBatch) -> bool:
        """Return whether a batch's weights are too far behind the newest known here.

        A restarted broker may not know the newest yet. (0, 0) means random actions, which never count as stale.
        """
        if held.weights == (0, 0) or held.weights >= self.weights:
            return False
        epoch, seq = self.weights
        return held.weights[0] != epoch or held.weights[1] < seq - self._limits.max_staleness

    def _make_room(self, source: Source, newest: StoredBatch) -> None:
        """Apply the overflow policy to `newest`, just accepted, and the batches before it; it is never overflow."""
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
        self._note_progress(source)

    # -- the books ----------------------------------------------------------------------------------------------------

    def rows(self) -> list[LedgerRow]:
        """Return the books of every incarnation known, each as of one consistent moment."""
        rows = (source.ledger_row() for source in self.sources.values())
        return [row for row in rows if row is not None]

    def sent_and_unsettled(self) -> int:
        """Return the number of batches and gaps that the learner was told of and has not committed."""
        return sum(held.with_learner for source in self.sources.values() for held in source.held.values())

    def held_batches(self) -> int:
        """Return the number of batches accepted and not settled."""
        return sum(len(source.held) for source in self.sources.values())

    def oldest_held_at(self) -> float | None:
        """Return the time at which the oldest unsettled batch was accepted."""
        return min((held.at for source in self.sources.values() for held in source.held.values()), default=None)


def _may_be_dropped(held: StoredBatch) -> bool:
    """Return True if the batch was never given to a learner, which might have trained on it."""
    return not held.handed and not held.dropped
