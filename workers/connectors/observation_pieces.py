"""Connectors that turn nested observations into one vector, or stack the last ones so that a policy sees motion."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.chunks.spaces import (
    Box,
    Discrete,
    Leaf,
    MultiDiscrete,
    Spaces,
    box_bounds,
    column_dtype,
    leaf_size,
    leaves,
)
from headrace.schemas.errors import ConfigError
from headrace.workers.connectors.connector import Columns, Connector, Rows, Tensors
from headrace.workers.envs.bounds import bounded_box

if TYPE_CHECKING:
    import torch


class FlattenObservations(Connector):
    """Connector that flattens observations to float32 (rows, size).

    All leaves stand side by side, in the space's order; integers of Discrete kinds are one-hot.
    """

    def connect(self, spaces: Spaces, width: int) -> Spaces:
        """Return the spaces with an unbounded Box of one axis as observation."""
        self._leaves = list(leaves(spaces.observation, "obs"))
        self._size = sum(one_hot_size(leaf) for _, leaf in self._leaves)
        return Spaces(observation=Box(shape=(self._size,), dtype="<f4"), action=spaces.action)

    def process(self, rows: Rows) -> Columns:
        parts = [as_vectors(leaf, rows.columns[name]) for name, leaf in self._leaves]
        return {"obs": parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)}

    def torch_process(self, columns: Tensors, actions: Tensors) -> dict[str, torch.Tensor]:
        import torch

        return {"obs": torch.cat([_as_tensor(leaf, columns[name]) for name, leaf in self._leaves], 1)}


def one_hot_size(leaf: Leaf) -> int:
    """Return the length of one row of `as_vectors`."""
    if isinstance(leaf, Discrete):
        return leaf.n
    return sum(leaf.flat_nvec) if isinstance(leaf, MultiDiscrete) else leaf_size(leaf)


def as_vectors(leaf: Leaf, values: NDArray[np.generic]) -> NDArray[np.float32]:
    """Return float32 (rows, one_hot_size): choices one-hot, one after another; other leaves flat."""
    if isinstance(leaf, Discrete | MultiDiscrete):
        sizes, starts = ((leaf.n,), (leaf.start,)) if isinstance(leaf, Discrete) else (leaf.flat_nvec, leaf.flat_start)
        begins = np.cumsum(sizes) - np.array(sizes) - np.array(starts)
        vectors = np.zeros((len(values), sum(sizes)), np.float32)
        np.put_along_axis(vectors, values.reshape(len(values), -1).astype(np.int64) + begins, 1.0, axis=1)
        return vectors
    return values.reshape(len(values), leaf_size(leaf)).astype(np.float32)


def _as_tensor(leaf: Leaf, values: torch.Tensor) -> torch.Tensor:
    """Do what `as_vectors` does, by torch operations."""
    import torch

    rows = values.shape[0]
    if not isinstance(leaf, Discrete | MultiDiscrete):
        return values.reshape(rows, -1).float()
    sizes, starts = ((leaf.n,), (leaf.start,)) if isinstance(leaf, Discrete) else (leaf.flat_nvec, leaf.flat_start)
    places = values.reshape(rows, -1).long() - torch.tensor(starts)
    one_hot = [torch.nn.functional.one_hot(places[:, k], size) for k, size in enumerate(sizes)]
    return torch.cat(one_hot, 1).float()


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
