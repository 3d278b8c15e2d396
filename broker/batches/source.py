"""A source: one life of a worker as the broker sees it, with the batches accepted, held and settled.

A batch is *held* from its acceptance until it is settled. Batches settle strictly by sequence number, so one value
(`Settled`) says what became of batches 1..n. It is the same whether the learner tells it by its commits, or a worker or
Redis after a restart of the broker. The longer history always wins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from headrace.broker.batches.life_figures import WorkerFigures
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
from headrace.schemas.accounts.logged_metrics import LoggedMetrics
from headrace.schemas.basics.bounds import Version
from headrace.schemas.frames.wire import Buffer
from headrace.schemas.messages import LastWords, WeightsRefusal

Peer = bytes
"""The routing id of one connection; a reconnect is another peer."""


@dataclass(slots=True)
class StoredBatch:
    """A batch between acceptance and settlement. `frames` is None when only the learner has its bytes."""

    seq: int
    steps: int
    chunks: int
    nbytes: int
    frames: list[Buffer] | None
    arrival: int
    at: float
    weights: Version = (0, 0)
    with_learner: bool = False
    handed: bool = False
    """A learner once had it and may have trained on it, so the broker can no longer drop it."""
    dropped: str = ""
    """Reason for which the learner does not get the batch; "" if it gets the batch."""

    @property
    def count(self) -> Count:
        """Return (steps, chunks)."""
        return (self.steps, self.chunks)

    def mark_given(self) -> None:
        """Mark the batch as given to the learner, which decides what becomes of it."""
        self.with_learner = self.handed = True
        self.dropped = ""


@dataclass(slots=True)
class Source:
    """The batches of one (slot, incarnation)."""

    slot: int
    incarnation: int
    key: tuple[int, int] = field(init=False)
    """(slot, incarnation)."""
    token: str = ""
    peer: Peer | None = None
    key_group: str = ""
    """The group of the key that its worker showed last."""
    accepted: int = 0
    accepted_count: Count = (0, 0)
    settled: Settled = field(default_factory=Settled)
    held: dict[int, StoredBatch] = field(default_factory=dict)
    with_learner: dict[int, HeldBatch] = field(default_factory=dict)
    """Batches that the learner has, and that this broker (restarted since) has not yet accepted."""
    totals: WorkerTotals = field(default_factory=WorkerTotals)
    """The worker's totals as of batch `accepted`; older only between a restart and the next batch."""
    dropped: dict[str, list[int]] = field(default_factory=dict)
    """Batches that the broker has dropped and that are not settled yet: numbers by reason."""
    left: dict[int, HeldBatch] = field(default_factory=dict)
    """Batches that a closed incarnation left behind and no broker accepted."""
    left_reason: str = ""
    end_reason: str = ""
    end_due: bool = False
    """True if a learner must be told of the end, again after each reconnect, until its user has taken it."""
    end_taken: bool = False
    """True once a learner's user has taken the end, whichever broker the learner reported it to."""
    closed: bool = False
    stopped: bool = False
    """True if this broker stops in order while it holds batches of this closed life."""
    silent_until: float = 0.0
    host: str = ""
    pid: int = 0
    headrace_version: str = ""
    """As the worker tells it; "" if it does not."""
    weights: Version = (0, 0)
    """The newest weights that its worker is known to act with: from a HELLO, a heartbeat or a batch."""
    blocked: str = ""
    metrics: LoggedMetrics = field(default_factory=dict)
    """Metrics that callbacks have logged, as of the worker's last heartbeat."""
    introduced: bool = False
    """True once the worker has told the spaces of its envs, so that it can sample."""
    num_envs: int = 1
    cut_steps: int = 1
    weights_told: dict[str, Any] = field(default_factory=dict)
    """The fields of messages about the weights that its worker loads: shapes and kinds of number; none: not told."""
    refused: WeightsRefusal | None = None
    """The newest weights that its worker could not load."""
    figures: WorkerFigures = field(default_factory=WorkerFigures)
    """Its worker's newest heartbeat, and figures from all. People read them; the broker decides nothing by them."""
    batch_bytes: int = 0
    """Bytes of the largest recent batch, from which credit is computed; 0 before the first one."""
    credit: int = 0
    """The highest batch that its worker was ever told it may send."""
    told: int = 0
    """`progress` as of the last Ack to its worker."""
    row: LedgerRow | None = None
    restored: LedgerRow | None = None
    """The final books, when an earlier broker closed them."""
    met_at: float | None = None
    """Time at which its worker first joined this broker; None for a life known only from others."""
    cut: WorkerTotals = field(default_factory=WorkerTotals)
    """The totals with the highest number of a batch that its worker, its recorder or Redis told."""
    made_before: int = 0
    """Env steps that earlier brokers knew of, from Redis. Live workers report theirs again; they are the same steps."""
    batches_before: int = 0
    """Batches that earlier brokers accepted, from Redis. A live worker sends those again that are not settled."""
    counted: int = 0
    """Part of `steps` that the fleet's sum already includes."""

    def __post_init__(self) -> None:
        self.key = (self.slot, self.incarnation)

    @property
    def ended(self) -> bool:
        """Return True once the broker accepts no later batch of this life."""
        return bool(self.end_reason)

    @property
    def steps(self) -> int:
        """Return the env steps of this life, by the newest totals that this broker or an earlier one got."""
        return max(self.totals.steps_of_envs, self.made_before)

    def is_unrecorded(self, words: LastWords) -> bool:
        """Return whether the life's supervisor found no recorder, though the life has told of steps: it was removed."""
        return not words.totals.stepped and not self.closed and bool(self.totals.stepped or self.cut.stepped)

    def know_cut(self, totals: WorkerTotals) -> None:
        """Note how many batches the worker has cut. No later batch can be settled, or held by a learner."""
        if totals.seq >= self.cut.seq:
            self.cut = totals

    def dispute(self, settled: Settled) -> str:
        """Return why a learner cannot have settled this; "" if it can."""
        total, shipped = settled.total(), (self.cut.shipped, self.cut.shipped_chunks)
        if settled.seq <= self.settled.seq:
            return ""
        if settled.seq > self.cut.seq:
            return f"batch {settled.seq} is settled; {self.cut.seq} are cut and {self.accepted} accepted"
        if settled.seq <= self.accepted:
            newly = takewhile(lambda held: held.seq <= settled.seq, self.held.values())  # they are in order of seq
            known = total_of((self.settled.total(), *(held.count for held in newly)))
            return f"{total} settled by batch {settled.seq}, not {known}" if total != known else ""
        if total[0] > shipped[0] or total[1] > shipped[1] or (settled.seq == self.cut.seq and total != shipped):
            return f"{total} settled by batch {settled.seq}; {shipped} are shipped by batch {self.cut.seq}"
        return ""

    def progress(self) -> int:
        """Return a number that grows by one with each batch accepted and with each settled."""
        return self.accepted + self.settled.seq

    def accept(self, held: StoredBatch, totals: WorkerTotals) -> None:
        """Take batch `accepted + 1`."""
        known = self.with_learner.pop(held.seq, None)
        if known is not None and known.count == held.count:
            held.mark_given()
        self.accepted = held.seq
        self.accepted_count = plus(self.accepted_count, held.count)
        self.held[held.seq] = held
        self.totals = totals
        self.know_cut(totals)
        self.weights = max(self.weights, held.weights)  # news between two heartbeats, for the lag that people see
        self.batch_bytes = max(held.nbytes, self.batch_bytes * 15 // 16)

    def learn_settled(self, settled: Settled) -> list[StoredBatch]:
        """Take over a longer history; return the held batches it settles."""
        if settled.seq <= self.settled.seq:
            return []
        gone = []
        while self.held and (seq := next(iter(self.held))) <= settled.seq:  # held batches are in order of seq
            gone.append(self.held.pop(seq))
        for seq in [seq for seq in self.with_learner if seq <= settled.seq]:
            del self.with_learner[seq]
        self._settle(settled)
        for seq in [seq for seq in self.left if seq <= settled.seq]:
            del self.left[seq]
        if settled.seq > self.accepted:
            self.accepted, self.accepted_count = settled.seq, settled.total()
        return gone

    def settle_dropped(self) -> list[StoredBatch]:
        """Settle dropped batches that are first in line, which needs no learner's commit. Return them."""
        gone = []
        while (held := self.held.get(self.settled.seq + 1)) is not None and held.dropped and not held.with_learner:
            self._settle(self.settled.add((0, 0), {held.dropped: held.count}))
            gone.append(self.held.pop(held.seq))
        return gone

    def drop(self, held: StoredBatch, reason: str) -> None:
        """Decide that the learner does not get a batch. Its worker is told, and need not keep its bytes."""
        held.dropped = reason
        self.dropped.setdefault(reason, []).append(held.seq)

    def _settle(self, settled: Settled) -> None:
        self.settled = settled
        if self.dropped:
            later = {reason: [seq for seq in seqs if seq > settled.seq] for reason, seqs in self.dropped.items()}
            self.dropped = {reason: seqs for reason, seqs in later.items() if seqs}

    def adopt_with_learner(self, now: float, left: Mapping[int, HeldBatch] | None = None) -> None:
        """Accept, without their bytes, the next batches in line that only the learner has: their worker is gone.

        `left` are the batches that the worker left behind by number, where that is known: the learner's must be equal.
        """
        while (known := self.with_learner.get(self.accepted + 1)) is not None:
            if left is not None and left.get(known.seq) != known:
                return
            self.accept(StoredBatch(known.seq, known.steps, known.chunks, 0, None, 0, now), self.totals)

    def close(self, totals: WorkerTotals, window: list[HeldBatch], reason: str) -> None:
        """Take the worker's last totals and what it left behind: open steps and batches that no broker accepted.

        `window` are the batches it had cut and not seen settled, each with its own counts, as the recorder holds them.
        The recorder has no steps by module, so those of the last batch accepted stay, if the worker told them.
        """
        discarded = dict(totals.discarded)
        if totals.open:
            lost_by = reason if reason in set(Discard) else Discard.WORKER_KILLED
            discarded[lost_by] = discarded.get(lost_by, 0) + totals.open
        by_module = self.totals.module_steps if self.totals.seq == self.accepted else {}
        self.totals = totals.model_copy(update={"open": 0, "discarded": discarded, "module_steps": by_module})
        self.left = {batch.seq: batch for batch in window if batch.seq > self.accepted}
        self.left_reason = reason if reason in set(Drop) else Drop.WORKER_KILLED
        self.end_reason = reason if self.met_at is None else self.end_reason or reason  # not met: not fenced here
        self.closed = True
        self.peer = None

    def rest_of(self, totals: WorkerTotals) -> list[HeldBatch]:
        """Return one entry for the batches cut by `totals` and not accepted here, if the recorder is lost too.

        An earlier broker had accepted these batches. Only their sum is known.
        """
        if totals.seq <= self.accepted:
            return []
        steps, chunks = totals.shipped - self.accepted_count[0], totals.shipped_chunks - self.accepted_count[1]
        return [HeldBatch(seq=totals.seq, steps=steps, chunks=chunks)] if steps >= 0 and chunks > 0 else []

    def lost(self) -> dict[str, Count]:
        """Return batches cut and never accepted, by name; known once the incarnation is closed."""
        return {self.left_reason: total_of(batch.count for batch in self.left.values())} if self.left else {}

    def ledger_row(self) -> LedgerRow | None:
        """Return the books as of the last moment at which the worker's totals covered exactly the batches accepted."""
        if self.restored is not None:
            return self.restored.model_copy(update={"end_taken": self.end_taken})
        if self.closed or self.totals.seq == self.accepted:
            self.row = LedgerRow.model_construct(  # its parts are checked, and thousands are made in a report
                slot=self.slot,
                incarnation=self.incarnation,
                totals=self.totals,
                accepted=self.accepted_count,
                held=total_of(batch.count for batch in self.held.values()),
                settled=self.settled,
                lost=self.lost(),
                closed=self.closed,
                end_taken=self.end_taken,
                stopped=self.stopped,
            )
        return self.row

    def waiting(self) -> Iterator[StoredBatch]:
        """Return the held batches that the learner was not told of yet, in order."""
        return (held for held in self.held.values() if not held.with_learner)
