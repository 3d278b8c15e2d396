"""Pieces between a policy's action and the env's: mapped into bounds, clipped. The chunk keeps both actions."""

from __future__ import annotations

from headrace.schemas.spaces import Box, Spaces, leaves
from headrace.workers.connectors.connector import Columns, Connector, Rows
from headrace.workers.envs.bounds import ActionBounds


class _BoxActions(Connector):
    def connect(self, spaces: Spaces, width: int) -> Spaces:
        """The spaces stay what they are: a policy's action may lie outside its space, what the env gets may not."""
        self._bounds = {n: ActionBounds(leaf) for n, leaf in leaves(spaces.action, "actions") if isinstance(leaf, Box)}
        return spaces


class UnsquashActions(_BoxActions):
    """Box actions mapped from [-1, 1] to the env's bounds where both are finite, and clipped to them.

    For modules that do not do so themselves, as the default actor-critic does. What is mapped is the policy's own
    action, whatever was made of it before, so that none is mapped twice; put this piece first.
    """

    def process(self, rows: Rows) -> Columns:
        """See `Connector`."""
        return {**rows.columns, **{n: b.clip(b.unsquash(rows.actions[n])) for n, b in self._bounds.items()}}


class ClipActions(_BoxActions):
    """Box actions clipped to the env's bounds; integers rounded."""

    def process(self, rows: Rows) -> Columns:
        """See `Connector`."""
        return {**rows.columns, **{name: bounds.clip(rows.columns[name]) for name, bounds in self._bounds.items()}}
