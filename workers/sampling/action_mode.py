"""How actions are chosen, for all steps of a fragment."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.schemas.chunk import EXPLORE, RANDOM_ACTIONS


@dataclass(frozen=True, slots=True)
class ActionMode:
    """Whether the policy chooses actions, exploring or not, or they are random."""

    explore: bool
    random_actions: bool

    @property
    def flags(self) -> int:
        """The mode as flags of the chunk table."""
        return EXPLORE * self.explore | RANDOM_ACTIONS * self.random_actions
