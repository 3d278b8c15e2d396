"""The connector that turns nested observations into one vector."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.chunks.spaces import Box, Discrete, Leaf, MultiDiscrete, Spaces, leaf_size, leaves
from headrace.workers.connectors.connector import Columns, Connector, Rows, Tensors

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
    return sum(leaf.nvec) if isinstance(leaf, MultiDiscrete) else leaf_size(leaf)


def as_vectors(leaf: Leaf, values: NDArray[np.generic]) -> NDArray[np.float32]:
    """Return float32 (rows, one_hot_size): choices one-hot, one after another; other leaves flat."""
    if isinstance(leaf, Discrete | MultiDiscrete):
        sizes, starts = ((leaf.n,), (leaf.start,)) if isinstance(leaf, Discrete) else (leaf.nvec, leaf.start)
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
    sizes, starts = ((leaf.n,), (leaf.start,)) if isinstance(leaf, Discrete) else (leaf.nvec, leaf.start)
    places = values.reshape(rows, -1).long() - torch.tensor(starts)
    one_hot = [torch.nn.functional.one_hot(places[:, k], size) for k, size in enumerate(sizes)]
    return torch.cat(one_hot, 1).float()
