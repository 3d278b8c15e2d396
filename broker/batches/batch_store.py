"""The store of all batches that the broker is responsible for.

It holds a batch until it is settled, queues it for the learner in order of arrival, and drops it only for a named
reason. The order of a source's batches never changes. The learner settles every batch that it was once given. The store
drops only batches that no learner was given. It drops none before a learner has reported which batches earlier brokers
gave it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from headrace.broker.batches.broker_observer import BrokerObserver
from headrace.broker.batches.delivery_queue import DeliveryQueue
from headrace.broker.batches.drop_policy import DropPolicy, may_be_dropped
from headrace.broker.batches.limits import BrokerLimits
from headrace.broker.batches.refusals import Refusals
from headrace.broker.batches.rounds import Rounds
from headrace.broker.batches.source import Source, StoredBatch
from headrace.schemas.accounts.folded_lives import FoldedLives
from headrace.schemas.accounts.ledger import Discard, Drop, HeldBatch, LedgerRow, Settled, WorkerTotals
from headrace.schemas.basics.bounds import WINDOW, Version
from headrace.schemas.basics.counted_warnings import CountedWarnings
from headrace.schemas.chunks.batch import BatchHeader
from headrace.schemas.messages import Skip, SourcePosition

log = logging.getLogger(__name__)


class BatchStore:
    """Sources by (slot, incarnation), and the queue to the learner."""

    def __init__(self, limits: BrokerLimits) -> None:
        self.sources: dict[tuple[int, int], Source] = {}
        self.by_slot: dict[int, dict[int, Source]] = {}
        self.folded: dict[int, FoldedLives] = {}
        """Folded lives by slot; they have no source any more."""
        self.unreported: set[tuple[int, int]] = set()
        """Sources that have changed since the last report to Redis."""
        self._limits = limits
        self.nbytes = 0
        """Bytes of all batches held; `batches` is their number. Neither counts a dropped batch."""
        self.batches = 0
        self.steps = 0
        """Env steps of all sources ever: those of this broker, and those that Redis knew."""
        self.weights: Version = (0, 0)
        """The newest published version, against which staleness is measured."""
        self.is_reconciled = False
        """True once a learner has said which batches it has. Before that no batch may be counted as lost or dropped."""
        self.window_steps: int | None = None
        """Steps that the learner wants under way in the whole fleet; 0: no such limit. None: no learner has told."""
        self.max_env_steps = limits.max_env_steps
        """Env steps of the fleet's whole life after which workers begin no fragment; None: no bound."""
        self.changed: set[tuple[int, int]] = set()
        """Sources whose workers must get an Ack."""
        self.policy = DropPolicy(limits)
        self.rounds = Rounds(limits.synchronous, limits.workers, limits.lease_s, limits.max_env_steps)
        self.queue = DeliveryQueue(self.rounds)
        self.observers: list[BrokerObserver] = [self.rounds, self.queue]
        """They hear in this order, then the features of `open_broker`."""
        self._arrivals = 0
        self._claimed: dict[tuple[int, int], _Claimed] = {}
        """Claims of the learner about lives that no worker, recorder or row has proved to this broker yet."""
        self.refusals = Refusals()
        self._warnings = CountedWarnings(log)

    def source(self, slot: int, incarnation: int) -> Source:
        """Return the source of this slot and incarnation, a new one if there is none."""
        known = self.sources.get((slot, incarnation))
        if known is None:
            known = self.sources[slot, incarnation] = Source(slot, incarnation)
            self.by_slot.setdefault(slot, {})[incarnation] = known
        return known

    def has_ended(self, slot: int, incarnation: int) -> bool:
        """Return whether this life is known to have ended."""
        source = self.sources.get((slot, incarnation))
        return self.is_folded(slot, incarnation) or (source is not None and (source.ended or source.closed))

    def is_folded(self, slot: int | None, incarnation: int) -> bool:
        """Return whether this life has ended, and was added to the folded lives of its slot."""
        return slot in self.folded and incarnation in self.folded[slot]

    def forget(self, source: Source) -> None:
        """Forget a source whose life was folded."""
        del self.sources[source.key]
        own = self.by_slot[source.slot]
        del own[source.incarnation]
        if not own:
            del self.by_slot[source.slot]
        self.changed.discard(source.key)
        self.unreported.discard(source.key)
        self._claimed.pop(source.key, None)
        self.queue.forget(source)

    def note_changed(self, source: Source) -> None:
        """Count the source's steps. Note that its worker must get an Ack, and Redis the source's row."""
        self._count(source)
        self.changed.add(source.key)
        self.unreported.add(source.key)

    # -- in -----------------------------------------------------------------------------------------------------------

    def prove(self, source: Source, totals: WorkerTotals) -> None:
        """Note how many batches a worker has cut, and take over the learner's earlier claims about them."""
        source.know_cut(totals)
        claimed = self._claimed.get(source.key)
        if claimed is not None and (claimed.newest <= source.cut.seq or source.met_at is not None or source.closed):
            del self._claimed[source.key]
            self._leave_with_learner(source, claimed.held)
            self.learn_settled(source.key, claimed.settled)
            self._note_progress(source)
            self.queue.settled(source, [], source.settled)  # the learner has some of its batches

    def learn_position(self, position: SourcePosition) -> bool:
        """Take over a learner's position in a source. Return whether it settles a batch."""
        key = (position.slot, position.incarnation)
        source = self.sources.get(key)
        before = source.settled.seq if source is not None else 0
        self.learn_settled(key, position.settled)
        if position.ended and source is not None and source.ended and position.settled.seq == source.accepted:
            self.take_end(source)
        return source is not None and source.settled.seq > before

    def take_end(self, source: Source) -> None:
        """Note that a learner's user has taken the end of a source, or that no learner is told of it."""
        if not source.end_taken:
            source.end_due, source.end_taken = False, True
            self.unreported.add(source.key)

    def learn_settled(self, key: tuple[int, int], settled: Settled) -> None:
        """Take over what a learner reports as settled of a source, or keep it as a claim while it is unproved."""
        source = self.sources.get(key)
        if self.is_folded(*key):
            return  # all of it is settled
        if source is None or _is_unproved(source, settled.seq):
            self._claim(key, settled, [])
        elif why := source.dispute(settled):
            self._note_dispute(key, why)
        elif settled.seq > source.settled.seq:  # commits also repeat positions, in case one was lost
            self.merge_settled(source, settled)

    def is_claimed(self, source: Source) -> bool:
        """Return whether a learner claims more batches of a source than are proved."""
        return source.key in self._claimed

    def _claim(self, key: tuple[int, int], settled: Settled, held: list[HeldBatch]) -> None:
        known = self._claimed.get(key)
        if known is not None:
            known.settled = max(known.settled, settled, key=lambda told: told.seq)
            known.held = held or known.held
        else:
            self._claimed[key] = _Claimed(settled, held)

    def _note_dispute(self, key: tuple[int, int], why: str) -> None:
        self.refusals.note("the learner", "implausible position", f"slot {key[0]} incarnation {key[1]}: {why}")

    def excess(self, source: Source, held: StoredBatch) -> tuple[str, str] | None:
        """Return code and sentence of a refusal if the next batch of a worker is more than the broker takes; else None.

        Credit counts batches, and is told to all workers before their batches come and their size is known. So the
        broker also takes none once it is full (`no_room`): it holds one batch more than `max_held_bytes` at most. That
        happens to honest workers, which send the batch again once there is room. No honest one is `beyond_credit`.
        """
        most = min(source.credit, source.settled.seq + WINDOW)
        if held.seq > most:
            return "beyond_credit", f"batch {held.seq}, where credit allows batch {most}"
        if not held.nbytes or self.room > 0 or self.makes_room or (self.takes_one and not source.held):
            return None
        source.batch_bytes = max(source.batch_bytes, held.nbytes)
        return "no_room", f"a batch of {held.nbytes} bytes, where as many are held as max_held_bytes allows"

    @property
    def room(self) -> int:
        """Return how many more bytes may be held; 0 or less if the broker is full."""
        return self._limits.max_held_bytes - self.nbytes

    @property
    def takes_one(self) -> bool:
        """Return whether a worker of which no batch is held may send one.

        Rounds must go on: learners take slots in order.
        """
        return self.room > 0 or self.rounds.active

    @property
    def makes_room(self) -> bool:
        """Return whether the broker drops the oldest batch where one does not fit."""
        return self._limits.overflow == "drop_oldest" and self.is_reconciled

    def accept(self, source: Source, held: StoredBatch, told: BatchHeader | Skip) -> None:
        """Take the next batch of a source, as its worker `told` it."""
        self._arrivals += 1
        held.arrival = self._arrivals
        source.accept(held, told.totals)
        if held.frames is not None:
            self.nbytes += held.nbytes
            self.batches += 1
        for observer in self.observers:
            observer.accepted(source, held, told)
        if not (held.with_learner or self.policy.is_passive):
            self._make_room(source, held)
        self._note_progress(source)

    def merge_settled(self, source: Source, settled: Settled) -> None:
        """Take over a longer history of a source, whether a learner, a worker or Redis tells it."""
        before, gone = source.settled, source.learn_settled(settled)
        for held in gone:
            if held.frames is not None:
                self.nbytes -= held.nbytes
                self.batches -= 1
        self._tell_settled(source, gone, before)
        self._note_progress(source)

    def restore(self, row: LedgerRow) -> None:
        """Take over a life's books that an earlier broker left."""
        if self.is_folded(row.slot, row.incarnation):
            return  # the earlier broker wrote the sum to its file, and not yet to Redis
        source = self.source(row.slot, row.incarnation)
        self.prove(source, row.totals)
        if why := source.dispute(row.settled):
            self.refusals.note("Redis", "implausible row", f"slot {row.slot} incarnation {row.incarnation}: {why}")
            return
        source.made_before = max(source.made_before, row.totals.steps_of_envs)
        source.batches_before = max(source.batches_before, row.totals.seq)
        self.merge_settled(source, row.settled)
        if row.closed and row.held == (0, 0) and not source.closed and not source.held:
            source.totals, source.closed, source.restored = row.totals, True, row
            source.end_reason, source.end_taken = source.end_reason or Discard.WORKER_KILLED, row.end_taken
        elif source.restored is not None and row.closed and row.settled.seq > source.restored.settled.seq:
            source.restored = row  # Redis knows more than the file

    def fence(self, source: Source) -> None:
        """Accept no more batches from a source.

        Its supervisor reports later what it left; then the caller calls `end`.
        """
        source.end_reason = source.end_reason or Discard.FENCED
        self._count(source)

    def end(self, source: Source, reason: str) -> None:
        """End a source: no more batches come from it. The learner is told after the source's last batch."""
        source.end_reason = source.end_reason or reason
        self._count(source)
        self.unreported.add(source.key)
        if not source.end_due and not source.end_taken:
            source.end_due = True
            for observer in self.observers:
                observer.ended(source)

    def _count(self, source: Source) -> None:
        steps = source.steps
        self.steps += steps - source.counted
        source.counted = steps

    def _note_progress(self, source: Source) -> None:
        self.note_changed(source)
        if self.is_reconciled:
            before = source.settled
            if gone := source.settle_dropped():
                self._tell_settled(source, gone, before)

    def _tell_settled(self, source: Source, batches: list[StoredBatch], before: Settled) -> None:
        for observer in self.observers if batches else ():
            observer.settled(source, batches, before)

    def limit_window(self, steps: int | None, consumed: int = 0) -> None:
        """Note how many steps the learner wants under way. Mark all workers for an Ack if that is a large change.

        A learner that has `consumed` batches and tells no number needs more of them than workers ship without one.
        """
        if steps is None and self.window_steps is None and consumed:
            steps = 0
        if steps is None or steps == self.window_steps:
            return
        if not steps or not self.window_steps or abs(steps - self.window_steps) > self.window_steps // 4:
            self.changed.update(key for key, source in self.sources.items() if source.peer is not None)
        self.window_steps = steps

    def end_sampling(self) -> None:
        """Stop workers from beginning fragments or rounds, as if the fleet had reached `max_env_steps`."""
        self.max_env_steps = self.rounds.max_env_steps = 0
        self.changed.update(key for key, source in self.sources.items() if source.peer is not None)

    # -- out ----------------------------------------------------------------------------------------------------------

    def reconcile(self, positions: Iterable[SourcePosition], in_hand: dict[str, list[HeldBatch]]) -> None:
        """Take over which batches a learner has settled and which it holds; queue the others again by arrival."""
        for source in self.sources.values():
            source.with_learner.clear()
            for held in source.held.values():
                held.with_learner = False
        self._claimed.clear()
        for name, batches in in_hand.items():
            slot, _, incarnation = name.partition("/")
            key = (int(slot), int(incarnation))
            known = self.sources.get(key)
            newest = max((batch.seq for batch in batches), default=0)
            if self.is_folded(*key):
                continue
            if known is None or _is_unproved(known, newest):
                self._claim(key, Settled(), batches)
            else:
                self._leave_with_learner(known, batches)
        self.is_reconciled = True
        for position in positions:
            self.learn_position(position)
            known = self.sources.get((position.slot, position.incarnation))
            if known is not None and known.end_taken and not position.ended:
                known.end_due, known.end_taken = True, False  # this learner's checkpoint is older than the end
        for source in self.sources.values():
            self._note_progress(source)
        self._requeue()
        self.drop_stale()

    def _leave_with_learner(self, source: Source, batches: list[HeldBatch]) -> None:
        for batch in batches:
            held = source.held.get(batch.seq)
            if held is not None and held.count == batch.count:
                held.mark_given()
            elif held is not None or batch.seq > source.cut.seq:
                self._note_dispute(source.key, f"it holds batch {batch.seq} of {batch.steps} steps, which never came")
            elif batch.seq > source.accepted:
                source.with_learner[batch.seq] = batch

    def _requeue(self) -> None:
        waiting = [(held.arrival, source, held.seq) for source in self.sources.values() for held in source.waiting()]
        waiting.sort(key=lambda entry: (entry[0], entry[2]))
        self.queue.clear()
        for _, source, seq in waiting:
            self.queue.add(source, seq)
        for source in self.sources.values():
            if source.ended and source.end_due:
                self.queue.add(source, 0)

    # -- dropping -----------------------------------------------------------------------------------------------------

    def publish(self, version: Version) -> None:
        """Note the newest version of the weights, and drop batches that have become stale."""
        self.weights = max(self.weights, version)
        self.drop_stale()

    def drop_stale(self) -> None:
        """Drop queued batches whose weights are too many versions behind the newest, before the learner gets them."""
        if self.is_reconciled:
            for source, held in self.policy.stale(self.weights):
                self._drop(source, held, Drop.STALE)

    def _make_room(self, source: Source, newest: StoredBatch) -> None:
        """Drop `newest`, just accepted, if it is stale, and the oldest batches if more are held than may be."""
        self.policy.add(source, newest.seq)
        if not self.is_reconciled:
            return
        if may_be_dropped(newest) and self.policy.is_stale(newest, self.weights):
            self._drop(source, newest, Drop.STALE)
        while (oldest := self.policy.oldest_beyond(self.nbytes, self.batches, newest)) is not None:
            self._drop(*oldest, Drop.OVERFLOW)

    def _drop(self, source: Source, held: StoredBatch, reason: Drop) -> None:
        if held.frames is not None:
            self.nbytes -= held.nbytes
            self.batches -= 1
        held.frames, held.nbytes = None, 0
        why = self.policy.explain(reason, held.weights, self.weights)
        self._warnings.warn(b"", reason, f"{held.steps} steps of worker {source.slot} are dropped: {why}")
        source.drop(held, reason)
        self._note_progress(source)

    # -- the books ----------------------------------------------------------------------------------------------------

    def rows(self) -> list[LedgerRow]:
        """Return the books of every incarnation known, each as of one consistent moment."""
        rows = (source.ledger_row() for source in self.sources.values())
        return [row for row in rows if row is not None]

    def sent_and_unsettled(self) -> int:
        """Return the number of batches and gaps that the learner was told of and has not committed."""
        return sum(held.with_learner for held in self.held())

    def held_batches(self) -> int:
        """Return the number of batches accepted and not settled."""
        return sum(len(source.held) for source in self.sources.values())

    def held(self) -> list[StoredBatch]:
        """Return these batches."""
        return [held for source in self.sources.values() if source.held for held in source.held.values()]


@dataclass(slots=True)
class _Claimed:
    """A learner's claim about one life: the batches it has settled, and those it holds."""

    settled: Settled
    held: list[HeldBatch]

    @property
    def newest(self) -> int:
        return max(self.settled.seq, *(batch.seq for batch in self.held), 0)


def _is_unproved(source: Source, seq: int) -> bool:
    """Return whether the source's worker, or its recorder, may still tell that it has cut batch `seq`."""
    return seq > source.cut.seq and source.met_at is None and not source.closed
