"""What a learner knows of each source, and what of it its user takes: batches, holes and ends, in order."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from headrace.schemas.ledger import Count, Settled
from headrace.schemas.messages import HeldBatch, SourcePosition

SourceKey = tuple[int, int]
"""(slot, incarnation)."""


class ArrivalKind(Enum):
    """What an arrival means to the user's stream."""

    BATCH = "batch"
    GAP = "gap"
    END = "end"


@dataclass(frozen=True, slots=True)
class Arrival:
    """One thing the user's stream takes, in order: a batch, a hole in a source, or a source's end."""

    kind: ArrivalKind
    key: SourceKey
    batch: HeldBatch | None = None
    content: object = None
    """Of a batch: what the caller of `receive_batch` handed in."""
    reason: str = ""
    lost: dict[str, Count] = field(default_factory=dict)
    """Of a hole: (steps, chunks) by reason."""


@dataclass(slots=True)
class SourceProgress:
    """One incarnation of a worker, as far as this learner has got with it."""

    received: int = 0
    """The last batch received, or passed over."""
    taken: Settled = Settled()
    """What became of the batches the user has taken."""
    committed: Settled = Settled()
    in_hand: deque[HeldBatch] = field(default_factory=deque)
    """Received and not committed."""
    ended: bool = False


def position_of(key: SourceKey, settled: Settled) -> SourcePosition:
    """How far the learner got with that source."""
    return SourcePosition(slot=key[0], incarnation=key[1], settled=settled)


def growth(before: dict[str, Count], after: dict[str, Count]) -> dict[str, Count]:
    """What was added to each count."""
    grown = {r: (n[0] - before.get(r, (0, 0))[0], n[1] - before.get(r, (0, 0))[1]) for r, n in after.items()}
    return {reason: count for reason, count in grown.items() if count != (0, 0)}
