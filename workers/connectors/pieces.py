"""Connectors that flatten or stack observations, and connectors that map actions into the env's bounds or clip them.

The chunk keeps both actions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.chunks.spaces import (
    Box,
    Dict,
    Discrete,
    Leaf,
    MultiDiscrete,
    Space,
    Spaces,
    box_bounds,
    column_dtype,
    leaf_size,
    leaves,
    map_leaves,
)
from headrace.schemas.errors import ConfigError
from headrace.workers.connectors.connector import Columns, Connector, Rows, Tensors
from headrace.workers.envs.action_masks import MASK, find_mask, is_mask
from headrace.workers.envs.bounds import ActionBounds, bounded_box

if TYPE_CHECKING:
    import torch


class FlattenObservations(Connector):
    """Connector that flattens observations to float32 (rows, size).

    All leaves stand side by side, in the space's order; integers of Discrete kinds are one-hot. An action mask stays as
    it is: the result is then a Dict of the mask, "action_mask", and the vector, "obs".
    """

    def connect(self, spaces: Spaces, width: int) -> Spaces:
        """Return the spaces with an unbounded Box of one axis as observation, beside an action mask if there is one.

        Raises `ConfigError` for several masks.
        """
        self._leaves = [(name, leaf) for name, leaf in leaves(spaces.observation, "obs") if not is_mask(name)]
        vector: Space = Box(shape=(sum(one_hot_size(leaf) for _, leaf in self._leaves),), dtype="<f4")
        self._name, self._masks = "obs", {}
        if (mask := find_mask(spaces.observation)) is not None:
            self._name = "obs/obs"
            vector = Dict(spaces={MASK: mask[1], "obs": vector})
            self._masks = {f"obs/{MASK}{n.removeprefix(mask[0])}": n for n, _ in leaves(mask[1], mask[0])}
        return Spaces(observation=vector, action=spaces.action)

    def process(self, rows: Rows) -> Columns:
        parts = [as_vectors(leaf, rows.columns[name]) for name, leaf in self._leaves]
        vector = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
        return {self._name: vector, **{name: rows.columns[given] for name, given in self._masks.items()}}

    def torch_process(self, columns: Tensors, actions: Tensors) -> dict[str, torch.Tensor]:
        import torch

        vector = torch.cat([as_tensor(leaf, columns[name]) for name, leaf in self._leaves], 1)
        return {self._name: vector, **{name: columns[given] for name, given in self._masks.items()}}


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


def as_tensor(leaf: Leaf, values: torch.Tensor) -> torch.Tensor:
    """Do what `as_vectors` does, by torch operations."""
    import torch

    rows = values.shape[0]
    if not isinstance(leaf, Discrete | MultiDiscrete):
        return values.reshape(rows, leaf_size(leaf)).float()
    sizes, starts = ((leaf.n,), (leaf.start,)) if isinstance(leaf, Discrete) else (leaf.flat_nvec, leaf.flat_start)
    places = values.reshape(rows, len(sizes)).long()
    one_hot = [  # a number beside a tensor needs no copy to its device
        torch.nn.functional.one_hot(places[:, k] - start if start else places[:, k], size)
        for k, (size, start) in enumerate(zip(sizes, starts, strict=True))
    ]
    return torch.cat(one_hot, 1).float()


class FrameStack(Connector):
    """Connector that joins the newest `frames` observations of a Box, oldest first, along `axis` of one observation.

    A vector stays a vector, and an image becomes an image of more channels (`axis` 0 for channels first). At the start
    of an episode its first observation fills the earlier places. An action mask beside the Box stays as it is.
    """

    def __init__(self, frames: int = 4, axis: int = -1) -> None:
        if frames < 1:
            raise ConfigError(f"FrameStack(frames={frames}): give 1 or more", key="env_to_module")
        self._frames, self._axis = frames, axis

    def connect(self, spaces: Spaces, width: int) -> Spaces:
        """Return the spaces with the Box `frames` times as long along the axis.

        Raises `ConfigError` for any other observation space.
        """
        (self._name, leaf), *others = [item for item in leaves(spaces.observation, "obs") if not is_mask(item[0])]
        if others or not isinstance(leaf, Box) or not -len(leaf.shape) <= self._axis < len(leaf.shape):
            raise ConfigError(
                f"FrameStack(axis={self._axis}) needs a Box with that axis, got {spaces.observation!r:.120}; "
                "put FlattenObservations before it",
                key="env_to_module",
            )
        low, high = (np.concatenate([bound] * self._frames, axis=self._axis) for bound in box_bounds(leaf))
        self._kept = np.zeros((self._frames, width, *leaf.shape), column_dtype(leaf))
        stacked = bounded_box(low, high, leaf.dtype)
        observation = map_leaves(spaces.observation, lambda n, sub: stacked if n == self._name else sub, "obs")
        return Spaces(observation=observation, action=spaces.action)

    def process(self, rows: Rows) -> Columns:
        newest, lanes = rows.columns[self._name], rows.lanes
        if rows.first:
            self._kept[:, lanes] = newest
        else:
            for i in range(1, self._frames):
                self._kept[i - 1, lanes] = self._kept[i, lanes]
            self._kept[-1, lanes] = newest
        axis = self._axis if self._axis < 0 else self._axis + 1  # rows come first
        stacked = np.concatenate([self._kept[i, lanes] for i in range(self._frames)], axis=axis)
        return {**rows.columns, self._name: stacked}

    def reset(self, lanes: NDArray[np.intp]) -> None:
        self._kept[:, lanes] = 0

    def widen(self, width: int) -> None:
        frames, before, *shape = self._kept.shape
        more = np.zeros((frames, width - before, *shape), self._kept.dtype)
        self._kept = np.concatenate((self._kept, more), axis=1)


class _BoxActions(Connector):
    """Base of connectors that change Box actions: keeps the bounds of each Box leaf."""

    def connect(self, spaces: Spaces, width: int) -> Spaces:
        """Return `spaces` unchanged: a policy's action may leave its space, but the env gets one inside the bounds."""
        self._bounds = {n: ActionBounds(leaf) for n, leaf in leaves(spaces.action, "actions") if isinstance(leaf, Box)}
        return spaces


class UnsquashActions(_BoxActions):
    """Connector that maps Box actions from [-1, 1] to the env's bounds where both are finite, and clips them.

    It is for modules that do not map their actions themselves, as the default actor-critic does. It maps the policy's
    own action, whatever earlier pieces made of it, so that no action is mapped twice. Put this piece first.
    """

    def connect(self, spaces: Spaces, width: int) -> Spaces:
        """Return `spaces` with bounds of [-1, 1] where actions are mapped, and floats in place of integers.

        A policy's action may leave its space, but the env gets one inside the bounds.
        """
        super().connect(spaces, width)
        return Spaces(observation=spaces.observation, action=map_leaves(spaces.action, _squashed, "actions"))

    def process(self, rows: Rows) -> Columns:
        return {**rows.columns, **{n: b.clip(b.unsquash(rows.actions[n])) for n, b in self._bounds.items()}}

    def torch_process(self, columns: Tensors, actions: Tensors) -> dict[str, torch.Tensor]:
        mapped = {name: b.torch_clip(b.torch_unsquash(actions[name])) for name, b in self._bounds.items()}
        return {**columns, **mapped}


class ClipActions(_BoxActions):
    """Connector that clips Box actions to the env's bounds and rounds integers."""

    def process(self, rows: Rows) -> Columns:
        return {**rows.columns, **{name: bounds.clip(rows.columns[name]) for name, bounds in self._bounds.items()}}

    def torch_process(self, columns: Tensors, actions: Tensors) -> dict[str, torch.Tensor]:
        return {**columns, **{name: bounds.torch_clip(columns[name]) for name, bounds in self._bounds.items()}}


def _squashed(name: str, leaf: Leaf) -> Space:
    if not isinstance(leaf, Box):
        return leaf
    low, high = box_bounds(leaf)
    mapped = np.isfinite(low) & np.isfinite(high)
    dtype = leaf.dtype if column_dtype(leaf).kind == "f" else "<f4"
    return bounded_box(np.where(mapped, -1.0, low), np.where(mapped, 1.0, high), dtype)
