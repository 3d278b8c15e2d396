"""A consumer group besides the learner's: its own books, position and lease over the same batches.

Its store has a source for each life of a worker, as the core's store has. The two share the frames of a batch, and what
the worker tells. Which batches are held, dropped and settled is the group's own.

A holding group never misses a batch: a worker keeps each one until the group has settled it too. Another group loses
its oldest batches when it holds too many, and those that were settled before a broker knew of it. Both are counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Literal

from headrace.broker.batches.batch_store import BatchStore
from headrace.broker.batches.folding import Folding
from headrace.broker.batches.limits import RECONCILE_WAIT_S, BrokerLimits, GroupState
from headrace.broker.batches.source import Source, StoredBatch
from headrace.broker.sessions.learner_sessions import LearnerSessions
from headrace.broker.sessions.outbox import Outbox
from headrace.schemas.accounts.folded_lives import FoldedLives
from headrace.schemas.accounts.ledger import (
    Count,
    Discard,
    Drop,
    HeldBatch,
    LedgerRow,
    Settled,
    WorkerTotals,
    plus,
    total_of,
)
from headrace.schemas.chunks.batch import BatchHeader
from headrace.schemas.messages import Skip

_SHARE_OF_MEMORY = 4
"""A group that drops batches holds at most `max_held_bytes` divided by this number."""


class ConsumerGroup:
    """The group `name` of one fleet. `on_slow`: what happens while it holds too many batches."""

    def __init__(
        self,
        name: str,
        fleet_id: str,
        on_slow: Literal["wait", "drop"],
        limits: BrokerLimits,
        state: GroupState,
        outbox: Outbox,
        now: float,
    ) -> None:
        self.name = name
        self.on_slow = on_slow
        limits = replace(limits, overflow="block", max_staleness=None, synchronous=False)
        if on_slow == "drop":
            limits = replace(limits, overflow="drop_oldest", max_held_bytes=limits.max_held_bytes // _SHARE_OF_MEMORY)
        self.store = BatchStore(limits)
        self.learners = LearnerSessions(fleet_id, state, self.store, outbox, name)
        self.folding = Folding(self.store)
        self._is_new = not state.epoch
        """True if no reader had the group under an earlier broker, and so none can hold batches of it."""
        self.store.is_reconciled = self._is_new
        self._reconciled_by = now + RECONCILE_WAIT_S
        self._closed: dict[tuple[int, int], Source] = {}
        """Lives whose books are closed in the core's store, and not yet here."""
        self._early: dict[tuple[int, int], list[tuple[Source, StoredBatch, BatchHeader | Skip, Count]]] = {}
        """Batches that came after a hole, before the reader has told whether it has what is missing."""
        self._early_bytes = 0
        self._most_early_bytes = limits.max_held_bytes

    @property
    def is_holding(self) -> bool:
        """Return whether workers wait for this group."""
        return self.on_slow == "wait"

    # -- what the core hears ------------------------------------------------------------------------------------------

    def meet(self, source: Source, known: Settled | None, totals: WorkerTotals) -> None:
        """Hear that a worker has joined, and what it knows of this group's progress: None for nothing.

        Of batches that no worker and no broker has any more, a group begins after those that the learner has settled.
        """
        own = self.store.source(*source.key)
        if known is not None:
            self.store.merge_settled(own, known)
        self.store.prove(own, totals)
        if known is None and own.accepted < source.settled.seq and self.store.is_reconciled:
            self._pass_over(own, source.settled.seq, source.settled.total())

    def look_at(self, source: Source) -> None:
        """Compare a life with the core's. Close one whose end was heard by an earlier broker.

        Go on where the core has learnt that batches were accepted, of which no broker has the bytes any more.
        """
        if source.closed:
            self.ended(source)
        elif not self.is_holding and self.store.is_reconciled and source.key not in self._early:
            own = self.store.source(*source.key)
            self.store.prove(own, source.cut)
            if own.accepted < source.accepted and not own.closed and not self.store.is_claimed(own):
                self._pass_over(own, source.accepted, source.accepted_count)

    def take(self, source: Source, held: StoredBatch, told: BatchHeader | Skip, before: Count) -> bool:
        """Take a batch that the broker got from a worker. Return False for one that the group has had already.

        before: (steps, chunks) of all earlier batches of this life.
        """
        own = self.store.source(*source.key)
        if held.seq <= own.accepted or own.closed:
            return False
        copy = replace(held, arrival=0, with_learner=False, handed=False)
        if not self.store.is_reconciled and (held.seq > own.accepted + 1 or source.key in self._early):
            self._early.setdefault(source.key, []).append((source, copy, told, before))
            self._early_bytes += held.nbytes
            return True
        if held.seq > own.accepted + 1:
            self.store.prove(own, told.totals)
            self._pass_over(own, held.seq - 1, before)
        self.store.accept(own, copy, told)
        return True

    def ended(self, source: Source) -> None:
        """Hear that no batch of this life comes any more."""
        if not self.store.is_folded(*source.key):
            self._closed[source.key] = source
            self._close(source)
            self.store.end(self.store.source(*source.key), source.end_reason)

    def restore(self, rows: Iterable[LedgerRow], folded: Mapping[int, FoldedLives]) -> None:
        """Take over the group's books that an earlier broker left."""
        self.folding.adopt(folded)
        for row in rows:
            self.store.restore(row)
            if row.closed:
                self.ended(_as_told(row))

    def _close(self, source: Source) -> None:
        """Close the books of a life as the core's are closed, once the group's reader has told which batches it has."""
        if self.store.is_folded(*source.key):
            self._closed.pop(source.key, None)
            return
        own = self.store.source(*source.key)
        if not source.closed or not self.store.is_reconciled:
            return
        self._closed.pop(source.key, None)
        if own.closed:
            return
        if source.restored is not None:
            source = _as_told(source.restored)
        self.store.prove(own, source.totals)
        own.adopt_with_learner(0.0)
        missing = zip(own.accepted_count, source.accepted_count, strict=True)
        if own.accepted < source.accepted and all(has <= of for has, of in missing):
            self._pass_over(own, source.accepted, source.accepted_count)
            own.adopt_with_learner(0.0)
        left = [batch for batch in source.left.values() if batch.seq > own.accepted]
        totals, known = source.totals, total_of((own.accepted_count, *(batch.count for batch in left)))
        if known != (totals.shipped, totals.shipped_chunks):  # the group has got more than the core's books know
            left = own.rest_of(totals)
        own.close(totals, left, source.end_reason)
        own.left_reason = source.left_reason
        self.store.note_changed(own)

    def _pass_over(self, own: Source, seq: int, count: Count) -> None:
        """Go on after batch `seq`: count as dropped what neither the broker nor the group's reader has of it.

        count: (steps, chunks) of all batches up to it.
        """
        while own.accepted < seq and (known := own.with_learner.get(own.accepted + 1)) is not None:
            own.accept(StoredBatch(known.seq, known.steps, known.chunks, 0, None, 0, 0.0), own.totals)
        if own.accepted >= seq:
            return
        reason = (Drop.BEFORE_GROUP if self._is_new and not own.accepted else Drop.BROKER_LOST).value  # a key of JSON
        missing = count[0] - own.accepted_count[0], count[1] - own.accepted_count[1]
        if not own.held:
            dropped = {**own.settled.dropped, reason: plus(own.settled.dropped.get(reason, (0, 0)), missing)}
            self.store.merge_settled(own, own.settled.model_copy(update={"seq": seq, "dropped": dropped}))
            return
        for number in range(own.accepted + 1, seq + 1):  # the reader hears of each in its turn
            steps, chunks = missing if number == seq else (0, 0)
            gap = StoredBatch(number, steps, chunks, 0, None, 0, 0.0, dropped=reason)
            self.store.accept(own, gap, skip_of(own, gap))

    def go_on(self) -> None:
        """Take the batches and close the lives that waited for the reader, once it was heard."""
        if not self.store.is_reconciled:
            return
        early, self._early, self._early_bytes = self._early, {}, 0
        for batches in early.values():
            for source, held, told, before in batches:
                self.take(source, held, told, before)
        for source in list(self._closed.values()):
            self._close(source)

    # -- time ---------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Close the books of lives that wait for the reader, once it was heard or does not come."""
        if now > self._reconciled_by or self._early_bytes > self._most_early_bytes:
            self.store.is_reconciled = True
        self.go_on()
        if not self.is_holding and not self.has_reader:
            for own in self.store.sources.values():
                if own.closed and not own.held:
                    self.store.take_end(own)

    def holds_up(self, source: Source) -> bool:
        """Return whether a worker waits for this group, which has not settled what the learner has."""
        is_late = self.store.source(*source.key).settled.seq < source.settled.seq
        return self.is_holding and source.blocked == "group" and is_late

    @property
    def has_reader(self) -> bool:
        """Return whether a stream of this group is connected, as far as is known."""
        return self.learners.lease is not None and self.learners.lease.stream is not None

    # -- the books ----------------------------------------------------------------------------------------------------

    def rows(self, sources: Mapping[tuple[int, int], Source]) -> list[LedgerRow]:
        """Return the group's books of each life, with what workers have told the core's `sources` last."""
        rows = (self._row(own, sources.get(key)) for key, own in self.store.sources.items())
        return [row for row in rows if row is not None]

    def take_changed(self, sources: Mapping[tuple[int, int], Source], told: set[tuple[int, int]]) -> list[LedgerRow]:
        """Return the same of the lives that changed since the last call, and of those of which workers have `told`."""
        changed, self.store.unreported = self.store.unreported, set()
        rows = (self._row(self.store.sources[k], sources.get(k)) for k in (changed | told) & self.store.sources.keys())
        return [row for row in rows if row is not None]

    def pass_over_folded(self, folded: Mapping[int, FoldedLives]) -> None:
        """Count the lives that the core had folded before the group began."""
        for slot, lives in folded.items():
            own = self.store.by_slot.get(slot, {})
            if slot not in self.store.folded and not any(incarnation in lives for incarnation in own):
                passed = Settled(seq=lives.row.settled.seq, dropped={Drop.BEFORE_GROUP.value: lives.row.accepted})
                row = lives.row.model_copy(update={"settled": passed})
                self.folding.adopt({slot: lives.model_copy(update={"row": row, "counters": {}})})

    def fold(self) -> None:
        """Fold finished lives, some at a time."""
        for source in self.folding.fold(lambda _: {}):
            self.learners.forget(source)

    def _row(self, own: Source, source: Source | None) -> LedgerRow | None:
        if source is not None and not own.closed and source.totals.seq == own.accepted:
            own.totals = source.totals
        return own.ledger_row()

    @property
    def lag_steps(self) -> int:
        """Return the agent steps that are accepted, and neither settled by the group nor dropped."""
        return total_of(held.count for held in self.store.held() if not held.dropped)[0]

    def oldest_age_s(self, now: float) -> float:
        """Return for how many seconds the broker has held the group's oldest batch; 0 for none."""
        return max((now - held.at for held in self.store.held() if held.at), default=0.0)


def _as_told(row: LedgerRow) -> Source:
    """Return the life of a closed row, as the broker that closed it knew it. What was lost counts as one batch."""
    steps, chunks = total_of(row.lost.values())
    left = [HeldBatch(seq=row.totals.seq, steps=steps, chunks=chunks)] if row.lost else []
    life = Source(row.slot, row.incarnation, accepted=row.totals.seq - len(left), accepted_count=row.accepted)
    life.close(row.totals, left, next(iter(row.lost), Discard.WORKER_KILLED))
    return life


def skip_of(source: Source, held: StoredBatch) -> Skip:
    """Return what stands for the message of a batch of which only the counts are known."""
    batch = HeldBatch(seq=held.seq, steps=held.steps, chunks=held.chunks)
    return Skip(
        slot=source.slot, incarnation=source.incarnation, batch=batch, reason=held.dropped, totals=source.totals
    )
