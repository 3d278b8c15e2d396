"""Judges the history of one schedule. It knows what was cut and what was trained, not how the protocol works."""

from __future__ import annotations

from collections import Counter, defaultdict

from headrace.schemas.ledger import Count, LedgerRow, plus
from headrace.schemas.messages import HeldBatch

Key = tuple[int, int]


class History:
    """What happened, and whether it may have."""

    def __init__(self) -> None:
        self.batches: dict[Key, dict[int, HeldBatch]] = defaultdict(dict)
        self.rows: dict[Key, LedgerRow] = {}
        self.ends: Counter[Key] = Counter()
        self.problems: list[str] = []

    def cut(self, slot: int, incarnation: int, batch: HeldBatch) -> None:
        """A worker has cut this batch."""
        self.batches[(slot, incarnation)][batch.seq] = batch

    def row(self, row: LedgerRow) -> None:
        """The broker reports these books; they must balance at every moment."""
        self.problems.extend(row.problems())
        self.rows[(row.slot, row.incarnation)] = row

    def ended(self, key: Key) -> None:
        self.ends[key] += 1

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
