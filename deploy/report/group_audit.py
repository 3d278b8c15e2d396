"""The audit of consumer groups: the books of each add up, and are of the same lives and steps as the ledger."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from headrace.deploy.run.redis_view import Snapshot
from headrace.schemas.accounts.consumer_groups import GroupBooks
from headrace.schemas.accounts.folded_lives import FoldedLives
from headrace.schemas.accounts.ledger import FleetLedger, LedgerRow, WorkerTotals

_SUMMED = ("steps", "shipped steps", "shipped chunks")


def group_problems(snapshot: Snapshot) -> Iterator[str]:
    """Yield one sentence for each thing that does not add up in the books of a group, or differs from the ledger."""
    for name, books in snapshot.groups.items():
        found = [_of_rows(books), off_balance("all lives", books.fleet())]
        found += [] if books.state.behind else [_of_lives(books, snapshot), _of_sums(books, snapshot)]
        yield from (f"group {name}: {problem}" for problems in found for problem in problems)


def off_balance(name: str, fleet: FleetLedger) -> Iterator[str]:
    """Yield a sentence if the sum of all lives does not add up."""
    if balance := fleet.balance():
        more = "more" if balance > 0 else "less"
        yield f"{name}: stepped is {abs(balance)} steps {more} than what became of them"


def _of_rows(books: GroupBooks) -> Iterator[str]:
    for row in books.rows.values():
        yield from row.problems()
    for lives in books.folded.values():
        yield from lives.problems()


def _of_lives(books: GroupBooks, snapshot: Snapshot) -> Iterator[str]:
    for life in sorted(snapshot.rows.keys() | books.rows.keys()):
        row, own, name = snapshot.rows.get(life), books.rows.get(life), f"slot {life[0]} incarnation {life[1]}"
        if row is not None and own is not None:
            if _totals(row) != _totals(own):
                yield f"{name}: accepted {own.accepted} and totals are not those of the ledger, {row.accepted}"
        elif (
            row is not None
            and row.totals.stepped
            and not (life[0] in books.folded and life[1] in books.folded[life[0]])
        ):
            yield f"{name}: the ledger has {row.totals.stepped:,} steps of this life, but the group lacks its row"
        elif own is not None and not snapshot.is_folded(life):
            yield f"{name}: the ledger does not know this life"


def _of_sums(books: GroupBooks, snapshot: Snapshot) -> Iterator[str]:
    """Yield the slots whose lives, folded or not, have other sums than in the ledger."""
    known, own = _by_slot(snapshot.rows, snapshot.folded), _by_slot(books.rows, books.folded)
    for slot in sorted(known.keys() | own.keys()):
        if known[slot] != own[slot]:
            told, theirs = (
                ", ".join(f"{sums[name]:,} {name}" for name in _SUMMED) for sums in (own[slot], known[slot])
            )
            yield f"slot {slot}: its lives have {told}, but those in the ledger {theirs}"


def _totals(row: LedgerRow) -> WorkerTotals:
    """Return the worker's totals, without those by module: the broker that closes a life may not know these."""
    return row.totals.model_copy(update={"module_steps": {}})


def _by_slot(
    rows: Mapping[tuple[int, int], LedgerRow], folded: Mapping[int, FoldedLives]
) -> defaultdict[int, Counter[str]]:
    """Return, by slot, the sums that are the same for all groups."""
    sums: defaultdict[int, Counter[str]] = defaultdict(Counter)
    for row in (*rows.values(), *(lives.row for lives in folded.values())):
        totals = row.totals
        sums[row.slot].update(dict(zip(_SUMMED, (totals.stepped, totals.shipped, totals.shipped_chunks), strict=True)))
    return sums
