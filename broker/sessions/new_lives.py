"""How many lives of workers peers may begin, or tell of, that the broker has not known.

The broker keeps a source, a row of the books and Redis fields for each life. So each one costs memory until it is
folded.
"""

from __future__ import annotations

from headrace.schemas.peers.message_budget import MessageBudget

LIVES_AT_ONCE, LIVES_PER_S = 2048, 16.0
"""New lives of one group, or without keys in all, at once and in each second after that. A thousand workers may start
together, or die together unknown to a broker that lost its state.
"""


class NewLives:
    """The budgets of new lives. The slots of workers that the config starts have budgets of their own."""

    def __init__(self, workers: int) -> None:
        self._own_slots = range(workers)
        self._now = 0.0
        self._budgets: dict[tuple[str | None, bool], MessageBudget] = {}
        """By group, and whether the slots are the config's own."""

    def may_begin(self, slot: int, group: str | None, now: float) -> bool:
        """Count a new life in a slot, told by a peer of a group. Return False if there were too many."""
        self._now = now
        is_own = slot in self._own_slots
        if (group, is_own) not in self._budgets:
            most = max(LIVES_AT_ONCE, 2 * len(self._own_slots)) if is_own else LIVES_AT_ONCE
            self._budgets[group, is_own] = MessageBudget(most, LIVES_PER_S, most, lambda: self._now)
        return self._budgets[group, is_own].spend()
