"""The books of a worker whose batches have 10 steps in 2 chunks each."""

from __future__ import annotations

from typing import Any

from headrace.schemas.accounts.ledger import HeldBatch, Settled, WorkerTotals


def totals(batches: int, **changes: Any) -> WorkerTotals:
    """Return the totals of a worker that has shipped so many batches."""
    counts = {"seq": batches, "stepped": 10 * batches, "shipped": 10 * batches, "shipped_chunks": 2 * batches}
    return WorkerTotals(**counts | changes)


def settled(batches: int) -> Settled:
    """Return the position of a learner that has committed so many batches."""
    return Settled(seq=batches, committed=(10 * batches, 2 * batches))


def window(first: int, last: int) -> list[HeldBatch]:
    """Return the batches from `first` to `last`, as a learner says that it holds them."""
    return [HeldBatch(seq=seq, steps=10, chunks=2) for seq in range(first, last + 1)]
