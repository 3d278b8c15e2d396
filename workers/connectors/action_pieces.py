"""Connectors that map a policy's action into the env's bounds or clip it. The chunk keeps both actions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headrace.schemas.chunks.spaces import Box, Leaf, Space, Spaces, box_bounds, column_dtype, leaves, map_leaves
from headrace.workers.connectors.connector import Columns, Connector, Rows, Tensors
from headrace.workers.envs.bounds import ActionBounds, bounded_box

if TYPE_CHECKING:
    import torch


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
