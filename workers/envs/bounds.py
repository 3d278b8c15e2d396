"""Ranges of a leaf and its dtype, maps of actions into the bounds of a Box, and the bounds of a reward."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.chunks.spaces import (
    Box,
    Discrete,
    Leaf,
    MultiBinary,
    MultiDiscrete,
    Space,
    box_bounds,
    column_dtype,
    exact_bound,
    leaf_shape,
    leaves,
)
from headrace.workers.envs.action_masks import is_mask

if TYPE_CHECKING:  # processes of envs import this file too, and start faster without it
    import torch

LARGEST_REWARD = float(np.finfo(np.float32).max)
"""Largest magnitude of a reward. A larger one is infinite in most learners, and sums of such rewards are useless."""
_SQUARE = LARGEST_REWARD**2
_WIDE = float(np.finfo(np.float64).max) / 2**32
"""Half range of a Box above which its product with an action may be infinite."""
_FEW = 32
"""Up to this number of choices, a set is faster than a comparison of arrays: 0.5 us for 8 of them, and not 1.6 us."""
_NOWHERE = np.empty(0, np.intp)


def unsound_rewards(rewards: NDArray[np.float64]) -> NDArray[np.intp]:
    """Return the positions of rewards that are not finite, or beyond `LARGEST_REWARD`."""
    if np.vdot(rewards, rewards) <= _SQUARE:  # one pass, and the usual case; false for NaN
        return _NOWHERE
    return np.flatnonzero(~(np.abs(rewards) <= LARGEST_REWARD))


def reward_due(seen: float) -> str:
    """Return in words the range of a reward, for an error about the reward `seen`."""
    return f"within {LARGEST_REWARD:.3g}" if np.isfinite(seen) else "finite scalar"


def leaf_bounds(leaf: Leaf) -> tuple[NDArray[Any] | None, NDArray[Any] | None]:
    """Return both bounds of any leaf, in the shape of a row; None where every value of the dtype is inside."""
    shape, dtype = leaf_shape(leaf), column_dtype(leaf)
    low: NDArray[Any]
    high: NDArray[Any]
    if isinstance(leaf, Box):
        low, high = (exact_bound(bound, dtype) for bound in box_bounds(leaf))
    elif isinstance(leaf, MultiDiscrete):
        low = leaf.start
        high = low + leaf.nvec - 1
    else:
        start, n = (leaf.start, leaf.n) if isinstance(leaf, Discrete) else (0, 2)
        low, high = np.full(shape, start), np.full(shape, start + n - 1)
    whole = (np.iinfo(dtype).min, np.iinfo(dtype).max) if dtype.kind in "iu" else (-np.inf, np.inf)
    return (None if (low <= whole[0]).all() else low), (None if (high >= whole[1]).all() else high)


def castable_bounds(leaf: Box) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return `box_bounds`, none above what a cast to the leaf's dtype keeps: 2**63 would become the least int64."""
    low, high = box_bounds(leaf)
    dtype = column_dtype(leaf)
    if dtype.kind not in "iu":
        return low, high
    most = float(np.iinfo(dtype).max)
    if most > np.iinfo(dtype).max:  # rounded up, as those of 64 bits
        most = math.nextafter(most, 0.0)
    return np.minimum(low, most), np.minimum(high, most)


def farthest_outside(
    rows: NDArray[Any], low: NDArray[Any] | None, high: NDArray[Any] | None
) -> dict[int, tuple[float, float]] | None:
    """Return the value farthest outside the bounds, and the bound, of each of `rows` (rows, *shape) that has one.

    None if a value is NaN, or an infinity beyond a finite bound: no learner can use it.
    """
    values = rows.reshape(len(rows), -1).astype(np.float64)
    if np.isnan(values).any():
        return None
    nearest = values if low is None else np.maximum(values, low.reshape(-1))
    nearest = nearest if high is None else np.minimum(nearest, high.reshape(-1))
    outside = values != nearest
    if not np.isfinite(values[outside]).all():
        return None
    with np.errstate(invalid="ignore", over="ignore"):  # of infinities inside, and of numbers far apart
        excess = np.where(outside, np.abs(values - nearest), 0.0)
    places = [(row, excess[row].argmax()) for row in np.flatnonzero(outside.any(1)).tolist()]
    return {row: (float(values[row, at]), float(nearest[row, at])) for row, at in places}


def blank_columns(space: Space, root: str, rows: int) -> dict[str, NDArray[Any]]:
    """Return columns of `rows` values inside `space`, for rows that have none: see `blank_value`.

    A module passes all rows, and may fail at other values: at a 0 of `Discrete(3, start=5)`, or at a mask of zeros.
    """
    columns = {name: np.zeros((rows, *leaf_shape(leaf)), column_dtype(leaf)) for name, leaf in leaves(space, root)}
    for name, leaf in leaves(space, root):
        blank = blank_value(name, leaf)
        if blank.any():  # pages of zeros take no memory until they are written
            columns[name][...] = blank
    return columns


def blank_value(name: str, leaf: Leaf) -> NDArray[Any]:
    """Return the value inside `leaf` that is nearest to 0, or to 1 in a mask: of its shape, or one number for all."""
    wanted = np.array(int(is_mask(name)))
    if isinstance(leaf, MultiBinary):
        return wanted
    if not isinstance(leaf, Box):
        sizes, start = (leaf.n, leaf.start) if isinstance(leaf, Discrete) else (leaf.nvec, leaf.start)
        return np.array(np.clip(wanted, start, np.array(start) + sizes - 1))
    low, high = (np.array(bound, np.float64) for bound in (leaf.flat_low, leaf.flat_high))  # None becomes NaN
    nearest: NDArray[Any] = np.fmin(np.fmax(wanted, low), high).astype(leaf.dtype)
    return nearest.reshape(leaf.shape) if nearest.ndim else nearest


def _choices(leaf: Leaf) -> frozenset[int]:
    """Return the choices of a Discrete leaf without too many of them, else none."""
    return frozenset(range(leaf.start, leaf.start + leaf.n) if isinstance(leaf, Discrete) and leaf.n <= 1024 else ())


class ActionLimits:
    """The bounds of the leaves of an action space: of whole choices, and with `boxes` of Box leaves too.

    A policy's Box action may leave its bounds on its way to the env, as those of a Gaussian do.
    """

    def __init__(self, space: Space, root: str, *, boxes: bool = False) -> None:
        checked = [(name, leaf) for name, leaf in leaves(space, root) if boxes or not isinstance(leaf, Box)]
        self._bounds = [(name, leaf, *leaf_bounds(leaf), _choices(leaf)) for name, leaf in checked]

    def problem(self, columns: Mapping[str, NDArray[Any]], rows: NDArray[Any] | None = None) -> str:
        """Return in words which action in `rows` (None: all) of the columns is outside its space; "" for none."""
        for name, leaf, low, high, choices in self._bounds:
            column = columns[name]
            if choices and column.ndim == 1 and len(column) <= _FEW and choices.issuperset(column.tolist()):
                continue
            outside = np.zeros(column.shape, np.bool_) if low is None else column < low
            if high is not None:
                outside = outside | (column > high)
            if not np.count_nonzero(outside):  # cheaper than `any`
                continue
            given, outside = (column, outside) if rows is None else (column[rows], outside[rows])
            bad = np.flatnonzero(outside.reshape(len(given), -1).any(1))
            if len(bad):
                from headrace.schemas.chunks.gymnasium_spaces import to_gym

                seen = f"{given[bad[0]].tolist()!r:.80} in {len(bad)} of {len(given)} rows"
                return f"{name} {seen}, outside {to_gym(leaf)!s:.200}"
        return ""


def whole_array(value: Any) -> NDArray[Any]:
    """Return `value` as an array. Raises `ValueError` for masked elements: numpy would show what the mask hides."""
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise ValueError("with masked elements")
    return np.asarray(value)


def holds(dtype: np.dtype[Any], values: NDArray[Any]) -> bool:
    """Return whether `dtype` holds all `values`: integers exactly, and reals within its range."""
    if values.dtype == dtype or not values.size:
        return True
    if values.dtype.kind not in "iu":
        if values.dtype.kind != "f" or dtype.kind != "f":
            return True
        beyond = np.abs(values) > np.finfo(dtype).max
        return not np.isfinite(values[beyond]).any()
    least, most = int(values.min()), int(values.max())
    if dtype.kind != "f":
        span = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        return bool(span[0] <= least and most <= span[1])
    exact = 2 ** (np.finfo(dtype).nmant + 1)
    if -exact <= least and most <= exact:
        return True
    with np.errstate(over="ignore"):
        return bool(values.ravel().tolist() == values.astype(dtype).ravel().tolist())


def bounded_box(low: NDArray[Any], high: NDArray[Any], dtype: str) -> Box:
    """Return the Box of these bounds, in their shape: the inverse of `box_bounds`."""
    return Box(shape=low.shape, dtype=dtype, low=_shared(low), high=_shared(high))


class ActionBounds:
    """Maps a policy's actions for a Box leaf, (rows, *shape) around 0, to the env's actions."""

    def __init__(self, leaf: Box) -> None:
        self.dtype = column_dtype(leaf)
        self.whole = self.dtype.kind in "iub"
        """True if the env takes integers, or True and False."""
        self._low, self._high = castable_bounds(leaf)
        bounded = np.isfinite(self._low) & np.isfinite(self._high)
        low, high = np.where(bounded, self._low, -1.0), np.where(bounded, self._high, 1.0)
        self._centre, self._half_range = low / 2 + high / 2, high / 2 - low / 2  # a sum of large bounds is infinite
        self._reach = np.where(self._half_range > _WIDE, 1.0, np.inf)
        """Largest action that is mapped: beyond it, the product with the half range could be infinite."""
        self._is_wide = bool(np.isfinite(self._reach).any())
        self._rows = _rows(self.dtype, self._centre, self._half_range, self._low, self._high)

    def unsquash(self, actions: NDArray[Any]) -> NDArray[np.float64]:
        """Map from [-1, 1] to the bounds where both are finite. Leave other elements and values outside as they are."""
        if self._is_wide:
            actions = np.clip(actions, -self._reach, self._reach)
        mapped: NDArray[np.float64] = self._centre + actions * self._half_range
        return mapped

    def squash(self, actions: NDArray[Any]) -> NDArray[np.float64]:
        """Return the inverse of `unsquash`; 0 where the bounds leave no choice."""
        half_range = np.where(self._half_range > 0, self._half_range, np.inf)
        mapped: NDArray[np.float64] = (actions - self._centre) / half_range
        return mapped

    def clip(self, actions: NDArray[Any]) -> NDArray[Any]:
        """Clip to the bounds, in the env's dtype. Round first if that is an integer."""
        clipped: NDArray[Any] = np.clip(np.rint(actions) if self.whole else actions, self._low, self._high)
        return clipped.astype(self.dtype)

    def to_env(self, actions: NDArray[Any]) -> NDArray[Any]:
        """Return what `clip` makes of `unsquash`, to the bit, for actions (rows, *shape). It is faster for few rows."""
        if self._is_wide:
            return self.clip(self.unsquash(actions))
        centre, half_range, low, high = self._rows
        mapped: NDArray[Any] = actions + centre if half_range is None else centre + actions * half_range
        if self.whole:
            np.rint(mapped, mapped)
        np.maximum(mapped, low, out=mapped)
        np.minimum(mapped, high, out=mapped)
        return mapped if half_range is None else mapped.astype(self.dtype)

    def torch_unsquash(self, actions: torch.Tensor) -> torch.Tensor:
        """Do what `unsquash` does, by torch operations."""
        return _tensor(self._centre) + actions.double() * _tensor(self._half_range)

    def torch_clip(self, actions: torch.Tensor) -> torch.Tensor:
        """Do what `clip` does, by torch operations."""
        whole = actions.double().round() if self.whole else actions.double()
        clipped = whole.maximum(_tensor(self._low)).minimum(_tensor(self._high))
        return clipped.to(_tensor(np.empty(0, self.dtype)).dtype)


def _rows(
    dtype: np.dtype[Any], centre: NDArray[Any], half_range: NDArray[Any], low: NDArray[Any], high: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[Any] | None, NDArray[Any], NDArray[Any]]:
    """Return the arguments with a row axis: numpy computes with arrays of one shape faster than it broadcasts.

    If actions stay as they are and the env's own dtype has the bounds exactly, the results have that dtype, and
    `half_range` is None. Then float32 numbers need no float64 ones, which would be the same.
    """
    stays = not centre.any() and bool((half_range == 1).all())
    if dtype.kind == "f" and stays and all((bound == bound.astype(dtype)).all() for bound in (low, high)):
        return centre.astype(dtype)[None], None, low.astype(dtype)[None], high.astype(dtype)[None]
    return centre[None], half_range[None], low[None], high[None]


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    import torch

    return torch.from_numpy(np.asarray(array))  # of shape () it may be a number


def _shared(bound: NDArray[Any]) -> float | tuple[float | None, ...] | None:
    """Return one number if all elements share it, None for infinity."""
    flat = bound.ravel()
    if (flat == flat[0]).all():
        return float(flat[0]) if np.isfinite(flat[0]) else None
    return tuple(value if math.isfinite(value) else None for value in flat.tolist())
