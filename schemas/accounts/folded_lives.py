"""Finished lives of a slot, folded: their ledger rows added up to one, so that old lives cost nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError

from headrace.schemas.accounts.ledger import COUNTERS, Count, LedgerRow, Settled, WorkerTotals, plus
from headrace.schemas.basics.bounds import MOST_COUNT, Incarnation, Natural

MOST_GAPS = 64
"""Ranges of lives of a slot that may be missing in its folded lives. Beyond it, later lives keep their rows."""

CountsByName = Annotated[dict[Annotated[str, Field(max_length=200)], Natural], Field(max_length=64)]
"""Counters of `lifetime_counters` that are in no ledger row."""

_VALUES = {name: attrgetter(row.value or name) for name, row in COUNTERS.items()}


class FoldedLives(BaseModel):
    """The finished lives of one slot, added up. They have no rows of their own any more.

    It has every life up to `highest`, except those in `missing`. So the broker knows for each life whether it was
    added, and adds none twice.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")
    highest: Incarnation
    missing: list[Annotated[tuple[Incarnation, Incarnation], Strict(False)]] = []
    """First and last of each range of lives up to `highest` that are not added: no broker has heard of them yet."""
    row: LedgerRow
    """The sum of their rows, with incarnation 0."""
    counters: CountsByName = {}
    """The sum of their other counters."""

    def __contains__(self, incarnation: object) -> bool:
        """Return whether this life was added."""
        if not isinstance(incarnation, int) or not 0 < incarnation <= self.highest:
            return False
        return not any(first <= incarnation <= last for first, last in self.missing)

    @property
    def lives(self) -> int:
        """Return the number of lives that were added."""
        return self.highest - sum(last - first + 1 for first, last in self.missing)

    def problems(self) -> Iterator[str]:
        """Yield one sentence for each equation that does not hold."""
        by_module = sum(self.row.totals.module_steps.values())
        # For some lives the accepted steps by module are unknown.
        totals = self.row.totals.model_copy(update={"module_steps": {}})
        name = f"slot {self.row.slot}, its {self.lives} folded lives"
        yield from self.row.model_copy(update={"totals": totals}).problems(name)
        if by_module > self.row.accepted[0]:
            yield f"{name}: accepted {self.row.accepted[0]} steps < those of their modules {by_module}"
        if self.row.held != (0, 0) or not self.row.closed or self.lives <= 0:
            yield f"{name}: they are not finished"

    def covers(self, other: FoldedLives) -> bool:
        """Return whether all lives of `other` are in here too."""
        if other.highest > self.highest:
            return False
        ends = (end for first, last in self.missing for end in _ends_of(first, last, other))
        return not any(end in other for end in ends)


def fold(
    before: FoldedLives | None, row: LedgerRow, counters: Mapping[str, int] = MappingProxyType({})
) -> FoldedLives | None:
    """Add a finished life and its other counters.

    None if it cannot be added: it is in already, there are too many gaps, or a sum too large.

    The caller makes sure that the row is final.
    """
    highest, missing = (before.highest, before.missing) if before is not None else (0, [])
    if row.incarnation > highest:
        missing = [*missing, *([(highest + 1, row.incarnation - 1)] if row.incarnation > highest + 1 else [])]
    elif before is not None and row.incarnation in before:
        return None
    else:
        missing = [part for gap in missing for part in _without(gap, row.incarnation)]
    if len(missing) > MOST_GAPS:
        return None
    summed = _plus_each(before.counters if before is not None else {}, counters)
    none = WorkerTotals(env_steps=0)
    no_lives = LedgerRow(
        slot=row.slot, incarnation=0, totals=none, accepted=(0, 0), held=(0, 0), settled=Settled(), closed=True
    )
    try:
        return FoldedLives(
            highest=max(highest, row.incarnation),
            missing=missing,
            row=_plus_row(before.row if before is not None else no_lives, row),
            counters={name: min(count, MOST_COUNT) for name, count in summed.items()},
        )
    except ValidationError:
        return None


def _without(gap: tuple[int, int], incarnation: int) -> Iterator[tuple[int, int]]:
    first, last = gap
    if not first <= incarnation <= last:
        yield gap
        return
    if first < incarnation:
        yield first, incarnation - 1
    if incarnation < last:
        yield incarnation + 1, last


def _ends_of(first: int, last: int, other: FoldedLives) -> Iterator[int]:
    """Yield the lives of a range to look up in `other`: if it has any life of the range, it has one of these."""
    yield first
    yield from (gap[1] + 1 for gap in other.missing if first <= gap[1] + 1 <= min(last, other.highest))


def _plus_row(folded: LedgerRow, row: LedgerRow) -> LedgerRow:
    """Return the sum of two rows. Raises `ValidationError` for one beyond the bounds."""
    a, b = folded.totals, row.totals
    counts = {name: value(a) + value(b) for name, value in _VALUES.items()}
    totals = WorkerTotals(
        **counts,
        discarded=_plus_each(a.discarded, b.discarded),
        dropped=_plus_pairs(a.dropped, b.dropped),
        module_steps=_plus_each(a.module_steps, b.module_steps),
    )
    settled = Settled(
        seq=folded.settled.seq + row.settled.seq,
        committed=plus(folded.settled.committed, row.settled.committed),
        dropped=_plus_pairs(folded.settled.dropped, row.settled.dropped),
    )
    return LedgerRow(
        slot=folded.slot,
        incarnation=0,
        totals=totals,
        accepted=plus(folded.accepted, row.accepted),
        held=plus(folded.held, row.held),
        settled=settled,
        lost=_plus_pairs(folded.lost, row.lost),
        closed=True,
    )


def _plus_each(a: Mapping[str, int], b: Mapping[str, int]) -> dict[str, int]:
    return {name: a.get(name, 0) + b.get(name, 0) for name in a.keys() | b.keys()}


def _plus_pairs(a: Mapping[str, Count], b: Mapping[str, Count]) -> dict[str, Count]:
    return {name: plus(a.get(name, (0, 0)), b.get(name, (0, 0))) for name in a.keys() | b.keys()}
