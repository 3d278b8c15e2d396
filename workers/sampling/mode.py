"""How actions are chosen; the same for all steps of a fragment."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.schemas.chunk import EXPLORE, RANDOM_ACTIONS


@dataclass(frozen=True, slots=True)
class Mode:
    """By the policy, exploring or not, or at random."""

    explore: bool
    random_actions: bool

    @property
    def flags(self) -> int:
        """As they stand in the chunk table."""
        return EXPLORE * self.explore | RANDOM_ACTIONS * self.random_actions
