"""Statistics of one module's training."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.chunk import ChunkEnd

RECENT_EPISODES = 100

Metrics = dict[str, float]
"""Figures of one update by name."""


class TrainingStats:
    """Updates, steps and finished episodes over the learner's whole life, and the returns of the newest episodes.

    Where envs have several agents, steps and episodes are those of agents.
    """

    def __init__(self) -> None:
        self.updates = 0
        self.steps = 0
        self.episodes = 0
        self.recent_returns: deque[float] = deque(maxlen=RECENT_EPISODES)

    def count(self, batches: Sequence[ChunkBatch]) -> None:
        """Count one more update, with `batches`."""
        self.updates += 1
        for batch in batches:
            done = np.isin(batch.table["end"], (ChunkEnd.TERMINATED, ChunkEnd.TRUNCATED))
            self.steps += batch.steps
            self.episodes += int(done.sum())
            self.recent_returns.extend(batch.table["episode_return"][done].tolist())

    @property
    def window_mean(self) -> float | None:
        """Mean return of the newest `RECENT_EPISODES` episodes; None before there are so many."""
        full = len(self.recent_returns) == RECENT_EPISODES
        return float(np.mean(self.recent_returns)) if full else None

    def metrics(self) -> Metrics:
        """Return "update", "steps", "episodes", and "mean_return" once an episode has finished."""
        counts = {"update": self.updates, "steps": self.steps, "episodes": self.episodes}
        return counts | ({"mean_return": float(np.mean(self.recent_returns))} if self.recent_returns else {})

    def get_state(self) -> dict[str, Any]:
        """Return plain JSON values for a checkpoint."""
        return {
            "updates": self.updates,
            "steps": self.steps,
            "episodes": self.episodes,
            "recent_returns": list(self.recent_returns),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from the result of `get_state`. Raises `KeyError` for any other."""
        self.updates, self.steps, self.episodes = state["updates"], state["steps"], state["episodes"]
        self.recent_returns = deque(state["recent_returns"], maxlen=RECENT_EPISODES)
