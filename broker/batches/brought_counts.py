"""The counters of lives that are older than this broker. Nothing here can prove them.

The fleet's totals must stay below 2^53, where Lua and JavaScript are exact. So all such lives together may bring 2^52.
Finished lives that Redis or the run directory remembers are among them: otherwise each broker would begin anew.
One peer that lies must not use up what others need, so the sum has parts:

    half       the slots of the config's own workers, an equal share each
    a quarter  other slots: each is sure of `SURE_IN_OTHER_SLOT`
    a quarter  what other slots bring beyond that, first come, first served
"""

from __future__ import annotations

from collections import Counter

from headrace.broker.batches.slot_owners import MOST_SLOTS

MOST_BROUGHT_IN_ALL = 1 << 52

SURE_IN_OTHER_SLOT = MOST_BROUGHT_IN_ALL // 4 // MOST_SLOTS
"""The largest counter that a slot may bring in any case: eight days of 100,000 steps a second."""


class BroughtCounts:
    """The sums of the largest counters of lives that are older than this broker, by slot.

    workers: number of the config's own.
    """

    def __init__(self, workers: int) -> None:
        self._own_slots = range(workers)
        self._by_slot: Counter[int] = Counter()
        self._sure = self._beyond = 0
        """Sums over the slots that are not the config's own: of the parts that are sure, and of the rest."""

    def has_room(self, slot: int | None, count: int) -> bool:
        """Return whether a life in a slot, None for a new one, may bring a counter of this size."""
        before = 0 if slot is None else self._by_slot[slot]
        if slot in self._own_slots:
            return before + count <= MOST_BROUGHT_IN_ALL // 2 // len(self._own_slots)
        sure = self._part_that_is_sure(before, count)
        return max(self._sure + sure, self._beyond + count - sure) <= MOST_BROUGHT_IN_ALL // 4

    def add(self, slot: int, count: int) -> None:
        """Note that a life has brought a counter of this size."""
        if slot not in self._own_slots:
            sure = self._part_that_is_sure(self._by_slot[slot], count)
            self._sure += sure
            self._beyond += count - sure
        self._by_slot[slot] += count

    @staticmethod
    def _part_that_is_sure(before: int, count: int) -> int:
        return min(count, max(0, SURE_IN_OTHER_SLOT - before))
