"""Folds the finished lives of a slot, so that old lives cost neither memory nor time.

A life folds once all of these hold:

- Its books are closed, all its batches are settled or lost, and Redis has its final row.
- A learner's user has taken its end, or it left no batch. A learner that knows the life is told that it may forget it.
- Redis has closed books of the life for each consumer group too.
- Two newer lives of its slot are known, and all known older ones are folded.

The broker then forgets its source. `FoldedLives` of its slot says that it was added. So no message and no late report
can bring it back, and a crash at any point neither loses nor repeats it: Redis has either the row or the sum.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping

from headrace.broker.batches.batch_store import BatchStore
from headrace.broker.batches.source import Source
from headrace.schemas.accounts.folded_lives import FoldedLives, fold
from headrace.schemas.accounts.ledger import LedgerRow, WorkerTotals

log = logging.getLogger(__name__)

KEPT_LIVES = 2
"""The newest lives of a slot, which keep a row of their own."""

MOST_AT_ONCE = 100
"""Lives that fold in one call, so that the broker's loop stands still for some milliseconds at most."""

_Life = tuple[int, int]


class Folding:
    """The choice of finished lives that may fold. Each store has one such object; `store.folded` holds the result.

    is_stored_elsewhere: returns whether Redis has closed books of a life for all other stores.
    """

    def __init__(self, store: BatchStore, is_stored_elsewhere: Callable[[Source], bool] = lambda _: True) -> None:
        self._store = store
        self._is_stored_elsewhere = is_stored_elsewhere
        self._stored: dict[_Life, LedgerRow] = {}
        """Closed rows that Redis has."""
        self._durable = False
        self._news: set[int] = set()

    def stored(self, rows: Iterable[LedgerRow], *, durable: bool = True) -> None:
        """Note closed rows that Redis has now. Not `durable`: no Redis is in use, and the rows exist nowhere else."""
        self._durable = durable
        for row in rows:
            if (row.slot, row.incarnation) in self._store.sources:
                self._stored[row.slot, row.incarnation] = row

    def has_closed(self, life: _Life) -> bool:
        """Return whether Redis has closed books of a life, of its own or in a sum."""
        return life in self._stored or self._store.is_folded(*life)

    def fold(self, counters_of: Callable[[Source], Mapping[str, int]]) -> list[Source]:
        """Fold the lives that may fold, up to `MOST_AT_ONCE`. Return their sources, which the store has forgotten.

        counters_of: returns the counters of a life that its row does not have.
        """
        gone: list[Source] = []
        for slot in [slot for slot, _ in self._stored if len(self._store.by_slot[slot]) > KEPT_LIVES]:
            for source in list(self._ready(slot)):
                if len(gone) >= MOST_AT_ONCE:
                    return gone
                folded = fold(self._store.folded.get(slot), self._stored[source.key], counters_of(source))
                if folded is None:
                    break
                self._store.folded[slot] = folded
                self._news.add(slot)
                self._drop(source)
                gone.append(source)
        return gone

    def _ready(self, slot: int) -> Iterator[Source]:
        own = self._store.by_slot.get(slot, {})
        for incarnation in sorted(own)[:-KEPT_LIVES]:
            source = own[incarnation]
            if not (self._may_fold(source) and self._is_stored_elsewhere(source)):
                return
            yield source

    def is_final(self, source: Source) -> bool:
        """Return whether the books of a life are final and in Redis, so that its recorder is not needed any more."""
        return self._durable and self._may_fold(source)

    def _may_fold(self, source: Source) -> bool:
        if not source.closed or source.held or source.with_learner or source.peer is not None:
            return False
        row = self._stored.get(source.key)
        if row is None or row.held != (0, 0) or row != source.ledger_row():
            return False
        return (source.end_taken or not source.accepted) and not any(row.problems())

    def _drop(self, source: Source) -> None:
        self._stored.pop(source.key, None)
        self._store.forget(source)

    def adopt(self, known: Mapping[int, FoldedLives]) -> list[Source]:
        """Take over folded lives that an earlier broker left in Redis, unless ours have them all.

        Return the sources that are folded in them, which the store has forgotten.
        """
        gone: list[Source] = []
        for slot, theirs in known.items():
            ours = self._store.folded.get(slot)
            if ours is not None and (ours.covers(theirs) or ours.lives >= theirs.lives):
                if not ours.covers(theirs):
                    log.error("slot %d: the folded lives in Redis are of another history and ignored", slot)
                continue
            self._store.folded[slot] = theirs
            self._news.add(slot)
            before = ours.row.totals if ours is not None else WorkerTotals()
            self._store.steps += theirs.row.totals.steps_of_envs - before.steps_of_envs
            for source in list(self._store.by_slot.get(slot, {}).values()):
                if source.incarnation in theirs:
                    self._store.steps -= source.counted
                    self._drop(source)
                    gone.append(source)
        return gone

    def take_news(self) -> dict[int, FoldedLives]:
        """Return the folded lives that have changed since the last call; at first all."""
        news, self._news = self._news, set()
        return {slot: self._store.folded[slot] for slot in news}
