"""The mode in which actions are chosen, for all steps of a fragment."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.schemas.chunks.chunk import EXPLORE, RANDOM_ACTIONS


@dataclass(frozen=True, slots=True)
class ActionMode:
    """The choice of actions: by the policy, exploring or not, or at random."""

    explore: bool
    random_actions: bool

    @property
    def flags(self) -> int:
        """The mode as flags of the chunk table."""
        return EXPLORE * self.explore | RANDOM_ACTIONS * self.random_actions
