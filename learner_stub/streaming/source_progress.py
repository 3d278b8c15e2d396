"""A learner's progress with each source, and the arrivals for its user: batches, holes and ends, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from headrace.schemas.accounts.ledger import Count, HeldBatch, Settled
from headrace.schemas.basics.bounds import TRAIN
from headrace.schemas.basics.printable import brief
from headrace.schemas.chunks.open_episodes import OpenEpisodes
from headrace.schemas.errors import ConfigError
from headrace.schemas.messages import SourcePosition, read
from headrace.schemas.peers.fleet_place import broker_fleet_id

SourceKey = tuple[int, int]
"""(slot, incarnation)."""


class CheckpointPosition(SourcePosition):
    """A learner's progress with one incarnation as its own checkpoint has it. No message carries it."""

    open_episodes: OpenEpisodes | None = None
    """Episodes that the learner knows to be open; None of a checkpoint that does not say, or if none is open."""
    gap_reason: str = ""
    """Reason for which batches before are missing; "" while none are."""


class ArrivalKind(Enum):
    """The kinds of arrivals."""

    BATCH = "batch"
    GAP = "gap"
    END = "end"


@dataclass(frozen=True, slots=True)
class Arrival:
    """One arrival for the user's stream, in order: a batch, a hole in a source, or a source's end."""

    kind: ArrivalKind
    key: SourceKey
    batch: HeldBatch | None = None
    content: object = None
    """For a batch: what the caller of `receive_batch` handed in. For an end: the message."""
    reason: str = ""
    lost: dict[str, Count] = field(default_factory=dict)
    """For a hole: (steps, chunks) by reason."""


@dataclass(slots=True)
class SourceProgress:
    """The progress of this learner with one incarnation of a worker."""

    received: int = 0
    """Number of the last batch that was received or passed over."""
    taken: Settled = Settled()
    """The final state of the batches that the user has taken."""
    committed: Settled = Settled()
    in_hand: deque[HeldBatch] = field(default_factory=deque)
    """Batches received and not committed."""
    ended: bool = False
    """True once the end of the source has arrived."""
    end_taken: bool = False
    """True once the user has taken the end."""
    end_committed: bool = False

    def uncommitted(self) -> int:
        """Return the number of batches and ends that the user has taken and not yet committed."""
        return self.taken.seq - self.committed.seq + (self.end_taken and not self.end_committed)


def position_of(key: SourceKey, settled: Settled, *, ended: bool) -> SourcePosition:
    """Return the position of a learner that settled `settled` of that source, and its end if `ended`."""
    return SourcePosition(slot=key[0], incarnation=key[1], settled=settled, ended=ended)


def growth(before: dict[str, Count], after: dict[str, Count]) -> dict[str, Count]:
    """Return what was added to each count."""
    grown = {r: (n[0] - before.get(r, (0, 0))[0], n[1] - before.get(r, (0, 0))[1]) for r, n in after.items()}
    return {reason: count for reason, count in grown.items() if count != (0, 0)}


def by_broker(
    position: Sequence[dict[str, Any]], fleet_id: str, count: int, group: str = TRAIN
) -> list[tuple[str, list[CheckpointPosition]]]:
    """Return for each of `count` brokers its fleet id, as far as it is known, and its part of a position.

    Raises `ConfigError` for a position of another group, and where a part is of several fleets: the position is of
    another number of brokers.
    """
    other = next((of for place in position if (of := place.get("group", TRAIN)) != group), None)
    if other is not None:
        raise ConfigError(f"it is of consumer group {brief(other)}, not of {group!r}", key="position")
    known = [(read(CheckpointPosition, place), str(place.get("fleet_id", ""))) for place in position]
    for place, _ in known:
        if place.open_episodes is not None:
            place.open_episodes.chunks()  # raises `DecodeError`
    parts: list[tuple[str, list[CheckpointPosition]]] = []
    for number in range(count):
        own = [(place, of) for place, of in known if place.slot % count == number]
        fleets = sorted({of for _, of in own if of})
        if len(fleets) > 1:
            detail = f"it is of the fleets {fleets}, not of {count} brokers; give the endpoint of each, in order"
            raise ConfigError(detail, key="position")
        expected = broker_fleet_id(fleet_id, number, count) or (fleets[0] if fleets else "")
        parts.append((expected, [place for place, _ in own]))
    return parts
