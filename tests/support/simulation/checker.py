"""Judges the history of one schedule. It knows what was cut and what was trained, not how the protocol works."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from headrace.schemas.accounts.folded_lives import FoldedLives
from headrace.schemas.accounts.ledger import Count, HeldBatch, LedgerRow, plus

Key = tuple[int, int]


def _numbers(row: LedgerRow) -> dict[str, int]:
    lost, dropped = sum(n for n, _ in row.lost.values()), sum(n for n, _ in row.settled.dropped.values())
    return {
        "stepped": row.totals.stepped,
        "cut": row.totals.seq,
        "accepted": row.accepted[0],
        "settled": row.settled.seq,
        "committed": row.settled.committed[0],
        "lost": lost,
        "dropped": dropped,
        "discarded": sum(row.totals.discarded.values()),
    }


class History:
    """Records the events of a schedule, and judges whether each may happen."""

    def __init__(self) -> None:
        self.batches: dict[Key, dict[int, HeldBatch]] = defaultdict(dict)
        self.rows: dict[Key, LedgerRow] = {}
        self.stepped: dict[Key, int] = {}
        """The steps of each life at its end."""
        self.problems: list[str] = []
        self.folds = 0
        """Lives that were folded at the end."""

    def cut(self, slot: int, incarnation: int, batch: HeldBatch) -> None:
        """A worker has cut this batch."""
        self.batches[(slot, incarnation)][batch.seq] = batch

    def row(self, row: LedgerRow) -> None:
        """The broker reports these books; they must balance at every moment."""
        self.problems.extend(row.problems())
        self.rows[(row.slot, row.incarnation)] = row

    def folded(self, folded: Iterable[FoldedLives], rows: set[Key]) -> None:
        """At the end: sums that must be those of the last books of each life, and lives that have a row."""
        for lives in folded:
            slot = lives.row.slot
            self.folds += lives.lives
            self.problems.extend(lives.problems())
            known = {key: row for key, row in self.rows.items() if key[0] == slot and key[1] in lives}
            twice = known.keys() & rows
            if twice or len(known) != lives.lives:
                self.problems.append(f"slot {slot}: folded {lives.lives} lives, known {sorted(known)}, twice {twice}")
            for name, value in _numbers(lives.row).items():
                own = sum(_numbers(row)[name] for row in known.values())
                if value != own:
                    self.problems.append(f"slot {slot}: folded lives have {value} {name}, their last books {own}")

    def died(self, slot: int, incarnation: int, stepped: int) -> None:
        """A worker's process has ended after so many steps."""
        self.stepped[(slot, incarnation)] = stepped

    def judge(self, trained: list[tuple[int, ...]], *, losses: set[str], one_learner: bool = True) -> list[str]:
        """Every promise that the history breaks, in words.

        `trained` is what the surviving model was trained on; `losses` are the only reasons for which a batch may be
        missing there. With rival learners a batch may rightly stand in the model of a fenced one instead.
        """
        found = list(self.problems)
        found += self._duplicates_and_order(trained)
        for key, batches in self.batches.items():
            mine = {seq for slot, inc, seq, *_ in trained if (slot, inc) == key}
            found += self._holes(key, batches, mine, losses, one_learner)
        for key, stepped in self.stepped.items():
            row = self.rows.get(key)
            if row is None or not row.closed or row.totals.stepped != stepped:
                found.append(f"{key}: ended after {stepped} steps, and its last books are {row!r}")
        return found

    def _duplicates_and_order(self, trained: list[tuple[int, ...]]) -> list[str]:
        found = []
        last: dict[Key, int] = {}
        for slot, incarnation, seq, steps, chunks in trained:
            key = (slot, incarnation)
            if seq <= last.get(key, 0):
                found.append(f"{key}: batch {seq} trained after {last[key]}: a duplicate or out of order")
            last[key] = seq
            cut = self.batches[key].get(seq)
            if cut is None or (cut.steps, cut.chunks) != (steps, chunks):
                found.append(f"{key}: batch {seq} trained was never cut like that")
        return found

    def _holes(
        self, key: Key, batches: dict[int, HeldBatch], trained: set[int], losses: set[str], one_learner: bool
    ) -> list[str]:
        """Batches neither trained nor counted as lost, and losses that no missing batch explains."""
        row = self.rows.get(key)
        if row is None:
            return [f"{key}: has no books"] if batches else []
        named: Count = (0, 0)
        for counts in (row.lost, row.settled.dropped):
            for reason, count in counts.items():
                named = plus(named, count)
                if reason not in losses and count != (0, 0):
                    return [f"{key}: lost {count} for {reason!r}, which nothing in this schedule explains"]
        cut = self._sum(batches, set(batches))
        if plus(named, row.settled.committed) != cut:
            return [f"{key}: {cut} were cut, but {row.settled.committed} are committed and {named} named as lost"]
        committed = self._sum(batches, trained)
        if one_learner and row.settled.committed != committed:
            return [f"{key}: {committed} were trained, but {row.settled.committed} stand as committed"]
        return []

    def _sum(self, batches: dict[int, HeldBatch], seqs: set[int]) -> Count:
        total: Count = (0, 0)
        for seq in seqs & set(batches):
            total = plus(total, (batches[seq].steps, batches[seq].chunks))
        return total
