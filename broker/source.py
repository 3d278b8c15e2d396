"""One life of a worker as the broker sees it: which of its batches were accepted or held, and what became of others.

A batch is *held* from its acceptance until it is settled. Settling goes strictly by sequence number, so that what
became of batches 1..n is one value (`Settled`), the same whoever tells it: the learner by its commits, a worker or
Redis after a restart of the broker. The longer history always wins.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from headrace.schemas.ledger import Count, Drop, LedgerRow, Settled, WorkerTotals, plus
from headrace.schemas.messages import HeldBatch, Version
from headrace.schemas.wire import Buffer

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
    """It was once with a learner, who may have trained on it: it can no longer be dropped here."""
    dropped: str = ""
    """Why the learner will not be given it; "" while it will."""

    @property
    def count(self) -> Count:
        return (self.steps, self.chunks)

    def give(self) -> None:
        """It is with the learner now, who decides what becomes of it."""
        self.with_learner = self.handed = True
        self.dropped = ""


@dataclass(slots=True)
class Source:
    """The batches of one (slot, incarnation)."""

    slot: int
    incarnation: int
    token: str = ""
    peer: Peer | None = None
    accepted: int = 0
    accepted_count: Count = (0, 0)
    settled: Settled = field(default_factory=Settled)
    held: dict[int, StoredBatch] = field(default_factory=dict)
    with_learner: dict[int, HeldBatch] = field(default_factory=dict)
    """Batches the learner says it has, that this broker (restarted since) has not yet accepted."""
    totals: WorkerTotals = field(default_factory=WorkerTotals)
    """The worker's, as of batch `accepted`; older only between a restart and the next batch."""
    left: dict[int, HeldBatch] = field(default_factory=dict)
    """Batches a closed incarnation left behind that nobody accepted."""
    left_reason: str = ""
    end_reason: str = ""
    end_due: bool = False
    """The present learner is to hear of the end."""
    closed: bool = False
    silent_until: float = 0.0
    weights: Version = (0, 0)
    blocked: str = ""
    batch_bytes: int = 0
    """Of the largest batch lately, from which credit is reckoned; 0 until there was one."""
    told: int = 0
    """`progress` as its worker was last told."""
    row: LedgerRow | None = None
    restored: LedgerRow | None = None
    """The final books, when an earlier broker closed them."""
    made_before: int = 0
    """Env steps that earlier brokers knew of, as Redis has it; those of live workers come again and are the same."""
    counted: int = 0
    """`steps`, as the fleet's sum has it."""

    @property
    def key(self) -> tuple[int, int]:
        return (self.slot, self.incarnation)

    @property
    def ended(self) -> bool:
        """No later batch of it will be accepted."""
        return bool(self.end_reason)

    @property
    def steps(self) -> int:
        """Env steps this life has made, as of the newest totals that came to this broker or those before."""
        return max(self.totals.steps_of_envs, self.made_before)

    def progress(self) -> int:
        """Grows by one with each batch accepted and with each settled."""
        return self.accepted + self.settled.seq

    def accept(self, held: StoredBatch, totals: WorkerTotals) -> None:
        """Take batch `accepted + 1`."""
        known = self.with_learner.pop(held.seq, None)
        if known is not None:
            held.give()
        self.accepted = held.seq
        self.accepted_count = plus(self.accepted_count, held.count)
        self.held[held.seq] = held
        self.totals = totals
        self.batch_bytes = max(held.nbytes, self.batch_bytes * 15 // 16)

    def learn_settled(self, settled: Settled) -> list[StoredBatch]:
        """Take over a longer history; returns the held batches it settles."""
        if settled.seq <= self.settled.seq:
            return []
        gone = []
        while self.held and (seq := next(iter(self.held))) <= settled.seq:  # they stand in order
            gone.append(self.held.pop(seq))
        for seq in [seq for seq in self.with_learner if seq <= settled.seq]:
            del self.with_learner[seq]
        self.settled = settled
        for seq in [seq for seq in self.left if seq <= settled.seq]:
            del self.left[seq]
        if settled.seq > self.accepted:
            self.accepted, self.accepted_count = settled.seq, settled.total()
        return gone

    def fold_dropped(self) -> list[StoredBatch]:
        """Settle dropped batches that stand first in line; no learner needs to be asked about those."""
        gone = []
        while (held := self.held.get(self.settled.seq + 1)) is not None and held.dropped and not held.with_learner:
            self.settled = self.settled.add((0, 0), {held.dropped: held.count})
            gone.append(self.held.pop(held.seq))
        return gone

    def adopt_with_learner(self, now: float) -> None:
        """Accept, without their bytes, the next batches in line that only the learner has: their worker is gone."""
        while (known := self.with_learner.get(self.accepted + 1)) is not None:
            self.accept(StoredBatch(known.seq, known.steps, known.chunks, 0, None, 0, now), self.totals)

    def close(self, totals: WorkerTotals, window: list[HeldBatch], reason: str) -> None:
        """Take the worker's last totals and what it left behind: open steps and batches nobody accepted.

        `window` are the batches it had cut and not seen settled, each with its own counts, as the recorder holds them.
        The recorder has no steps by module, so that those of the last batch accepted stay, if they were told.
        """
        discarded = dict(totals.discarded)
        if totals.open:
            discarded[reason] = discarded.get(reason, 0) + totals.open
        by_module = self.totals.module_steps if self.totals.seq == self.accepted else {}
        self.totals = totals.model_copy(update={"open": 0, "discarded": discarded, "module_steps": by_module})
        self.left = {batch.seq: batch for batch in window if batch.seq > self.accepted}
        self.left_reason = reason if reason in set(Drop) else Drop.WORKER_KILLED
        self.end_reason = self.end_reason or reason
        self.closed = True
        self.peer = None

    def lost(self) -> dict[str, Count]:
        """Batches cut and never accepted, by name; known once the incarnation is closed."""
        total: Count = (0, 0)
        for batch in self.left.values():
            total = plus(total, (batch.steps, batch.chunks))
        return {self.left_reason: total} if self.left else {}

    def ledger_row(self) -> LedgerRow | None:
        """The books as of one moment: the last at which the worker's totals spoke of the batches accepted."""
        if self.restored is not None:
            return self.restored
        if self.closed or self.totals.seq == self.accepted:
            held: Count = (0, 0)
            for batch in self.held.values():
                held = plus(held, batch.count)
            self.row = LedgerRow(
                slot=self.slot,
                incarnation=self.incarnation,
                totals=self.totals,
                accepted=self.accepted_count,
                held=held,
                settled=self.settled,
                lost=self.lost(),
                closed=self.closed,
            )
        return self.row

    def waiting(self) -> Iterator[StoredBatch]:
        """Held batches that the learner is still to be told of, in order."""
        return (held for held in self.held.values() if not held.with_learner)
