"""Actions on their way to the envs: in columns, in each env's own form, and at random from given numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.basics.printable import brief
from headrace.schemas.chunks.spaces import (
    Box,
    Dict,
    Discrete,
    Leaf,
    MultiDiscrete,
    Space,
    Tuple,
    column_dtype,
    leaf_shape,
    leaf_size,
    leaf_values,
    leaves,
)
from headrace.schemas.errors import EnvContractError
from headrace.workers.envs.bounds import castable_bounds, holds, whole_array


def write_actions(
    into: Mapping[str, NDArray[Any]], lanes: Sequence[int] | None, columns: Mapping[str, NDArray[Any]], root: str
) -> None:
    """Write the rows of `lanes` (None: all) of the columns below `root` into those below "actions", (width, ...)."""
    rows: Any = slice(None) if lanes is None else lanes
    for name, column in into.items():
        column[rows] = columns[root + name.removeprefix("actions")][rows]


def columns_of(space: Space, actions: Any, rows: int) -> dict[str, NDArray[Any]]:
    """Return `actions`, arrays (rows, *shape) nested as `space` is, as columns below "actions".

    Raises `EnvContractError` for another nesting or shape, and for numbers that the space's dtype would change.
    """
    try:
        arrays = [whole_array(value) for value in leaf_values(space, actions)]
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise EnvContractError("actions", brief(actions), f"arrays nested as the space {space!r:.200}") from error
    columns = {}
    for (name, leaf), array in zip(leaves(space, "actions"), arrays, strict=True):
        dtype, shape = column_dtype(leaf), (rows, *leaf_shape(leaf))
        if array.shape != shape or array.dtype.kind not in ("iub" if dtype.kind in "iub" else "iubf"):
            raise EnvContractError(name, f"{array.dtype} {array.shape}", f"{dtype} {shape}, a row for each env")
        if not holds(dtype, array):
            raise EnvContractError(name, f"values from {array.min()} to {array.max()}", f"within {dtype}")
        columns[name] = array.astype(dtype, copy=False)
    return columns


def to_env_form(space: Space, columns: Mapping[str, NDArray[Any]], root: str = "actions") -> list[Any]:
    """Return one action for each row, in the nesting of `space`: numpy scalars for Discrete, views for other leaves.

    Scalars have the space's dtype, as from `Space.sample`: gymnasium checks them faster than Python ints.
    """
    if isinstance(space, Dict):
        items = [(key, to_env_form(sub, columns, f"{root}/{key}")) for key, sub in space.spaces.items()]
        return [{key: rows[i] for key, rows in items} for i in range(len(items[0][1]))]
    if isinstance(space, Tuple):
        parts = [to_env_form(sub, columns, f"{root}/{index}") for index, sub in enumerate(space.spaces)]
        return list(zip(*parts, strict=True))
    column = columns[root]
    return [column[row] for row in range(len(column))]  # `list` asks for one more, whose IndexError takes its time


def action_root(columns: Mapping[str, NDArray[Any]]) -> str:
    """Return the name under which the policy's columns have the envs' actions: "actions_for_env", else "actions"."""
    if "actions" in columns:  # of a space that is not nested
        return "actions_for_env" if "actions_for_env" in columns else "actions"
    for name in columns:  # a generator would cost twice as much, in each poll
        if name.startswith("actions_for_env"):
            return "actions_for_env"
    return "actions"


class RandomActions:
    """Makes random actions from numbers in [0, 1) that the caller gives, by the rules of gymnasium's `Space.sample`.

    Integers and bounded reals are uniform. Reals bounded on one side are shifted exponential, unbounded ones normal.
    One action takes `noise_size` numbers.
    """

    def __init__(self, space: Space) -> None:
        self._leaves = list(leaves(space, "actions"))
        self.noise_size = sum(leaf_size(leaf) for _, leaf in self._leaves)

    def __call__(self, noise: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
        """Return action columns for noise float32 (envs, noise_size)."""
        columns = {}
        at = 0
        for name, leaf in self._leaves:
            size = leaf_size(leaf)
            numbers = noise[:, at : at + size].astype(np.float64).reshape(-1, *leaf_shape(leaf))
            columns[name] = _spread(leaf, numbers).astype(column_dtype(leaf))
            at += size
        return columns


def _spread(leaf: Leaf, numbers: NDArray[np.float64]) -> NDArray[Any]:
    if isinstance(leaf, Box):
        return _spread_box(leaf, numbers)
    if isinstance(leaf, Discrete):
        return np.floor(numbers * leaf.n) + leaf.start
    if isinstance(leaf, MultiDiscrete):
        spread: NDArray[np.float64] = np.floor(numbers * leaf.nvec) + leaf.start
        return spread
    return np.floor(numbers * 2)


def _spread_box(leaf: Box, numbers: NDArray[np.float64]) -> NDArray[Any]:
    low, high = castable_bounds(leaf)
    below, above = np.isfinite(low), np.isfinite(high)
    floor, ceiling = np.where(below, low, 0.0), np.where(above, high, 0.0)
    dtype = column_dtype(leaf)
    if dtype.kind in "iub":
        drawn: NDArray[np.float64] = np.floor(floor + numbers * (ceiling - floor + 1.0))
        return np.minimum(drawn, ceiling)
    exponential = -np.log1p(-numbers)
    one_sided = np.where(below, floor + exponential, np.where(above, ceiling - exponential, _normal(numbers)))
    half_range = ceiling / 2 - floor / 2
    wide = half_range > np.finfo(np.float64).max / 2  # twice of it is infinite
    between = floor + numbers * (2 * np.where(wide, 0.0, half_range))
    between = np.where(wide, floor * (1 - numbers) + ceiling * numbers, between)
    most = np.finfo(dtype).max
    spread: NDArray[np.float64] = np.clip(np.where(below & above, between, one_sided), -most, most)
    return spread


def _normal(numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    import torch  # here, because a process of envs imports this file too and must not load torch for it

    spread: NDArray[np.float64] = torch.special.ndtri(torch.from_numpy(np.maximum(numbers, 2.0**-25))).numpy()
    return spread
