"""The files of a run with checkpoints of its learner, and the progress that they tell."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.schemas.basics.bounds import MOST_COUNT

NEWEST_FILE, BEST_FILE = "learner.checkpoint", "best.checkpoint"


@dataclass(frozen=True, slots=True)
class TrainingCounts:
    """The progress of a checkpoint's training; steps are agent steps."""

    updates: int = 0
    steps: int = 0

    def words(self, epoch: int) -> str:
        """Return the update of a learner epoch in words; the epoch alone if the learner told no updates."""
        return f"update {self.updates:,} of learner epoch {epoch}" if self.updates else f"learner epoch {epoch}"


def counts_of(state: Mapping[str, Any]) -> TrainingCounts:
    """Return the counts of a learner of one policy, or of several, which update together and share the steps.

    A number that is no count is left out.
    """
    modules = state.get("modules")
    own = [one for one in (modules.values() if isinstance(modules, dict) else [state]) if isinstance(one, dict)]
    updates, steps = (
        [count for one in own if type(count := one.get(name)) is int and 0 <= count <= MOST_COUNT]
        for name in ("updates", "steps")
    )
    return TrainingCounts(max(updates, default=0), sum(steps))


def mean_return_of(state: Mapping[str, Any]) -> float | None:
    """Return the mean of the newest returns in a checkpoint of the reference learner, of one policy; else None."""
    returns = state.get("recent_returns")
    if not isinstance(returns, list) or not returns or not all(isinstance(one, int | float) for one in returns):
        return None
    mean = sum(returns) / len(returns)
    return mean if math.isfinite(mean) else None
