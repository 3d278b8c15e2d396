"""The connector that stacks the last observations, so that a module without memory sees motion."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.chunks.spaces import Box, Spaces, box_bounds, column_dtype
from headrace.schemas.errors import ConfigError
from headrace.workers.connectors.connector import Columns, Connector, Rows
from headrace.workers.envs.bounds import bounded_box


class FrameStack(Connector):
    """Connector that joins the newest `frames` observations of a Box, oldest first, along `axis` of one observation.

    A vector stays a vector, and an image becomes an image of more channels (`axis` 0 for channels first). At the start
    of an episode its first observation fills the earlier places.
    """

    def __init__(self, frames: int = 4, axis: int = -1) -> None:
        if frames < 1:
            raise ConfigError(f"FrameStack(frames={frames}): give 1 or more", key="env_to_module")
        self._frames, self._axis = frames, axis

    def connect(self, spaces: Spaces, width: int) -> Spaces:
        """Return the spaces with the Box `frames` times as long along the axis.

        Raises `ConfigError` for any other observation space.
        """
        leaf = spaces.observation
        if not isinstance(leaf, Box) or not -len(leaf.shape) <= self._axis < len(leaf.shape):
            raise ConfigError(
                f"FrameStack(axis={self._axis}) needs a Box with that axis, got {leaf!r:.120}; "
                "put FlattenObservations before it",
                key="env_to_module",
            )
        low, high = (np.concatenate([bound] * self._frames, axis=self._axis) for bound in box_bounds(leaf))
        self._kept = np.zeros((self._frames, width, *leaf.shape), column_dtype(leaf))
        return Spaces(observation=bounded_box(low, high, leaf.dtype), action=spaces.action)

    def process(self, rows: Rows) -> Columns:
        newest, lanes = rows.columns["obs"], rows.lanes
        if rows.first:
            self._kept[:, lanes] = newest
        else:
            for i in range(1, self._frames):
                self._kept[i - 1, lanes] = self._kept[i, lanes]
            self._kept[-1, lanes] = newest
        axis = self._axis if self._axis < 0 else self._axis + 1  # rows come first
        return {"obs": np.concatenate([self._kept[i, lanes] for i in range(self._frames)], axis=axis)}

    def reset(self, lanes: NDArray[np.intp]) -> None:
        self._kept[:, lanes] = 0

    def widen(self, width: int) -> None:
        frames, before, *shape = self._kept.shape
        more = np.zeros((frames, width - before, *shape), self._kept.dtype)
        self._kept = np.concatenate((self._kept, more), axis=1)
