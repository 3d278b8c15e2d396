"""The current observation of each env of a vector, in columns. Each is checked when it is written.

A poll usually costs a handful of array operations: all envs' observations are joined and compared together. Only if
this comparison fails, each env is checked alone, to name the env and the value that was seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.basics.printable import brief
from headrace.schemas.basics.stop_event import raise_stop
from headrace.schemas.chunks.spaces import Box, Dict, Leaf, Space, Tuple, column_dtype, leaf_shape, leaves
from headrace.schemas.errors import EnvContractError
from headrace.workers.envs.bounds import blank_columns, blank_value, farthest_outside, holds, leaf_bounds, whole_array

LaneIndex = NDArray[np.intp] | None
"""Indices of envs; None means all of them."""
Farthest = dict[str, tuple[float, float]]
"""Part of an observation -> (the value farthest outside, the bound it has left)."""
NoteOutside = Callable[[int, Farthest], None]
"""Called with the number of observations outside their Box, and how far each part of them was."""
_PLAIN = {np.ndarray}
_FLOATS = {float, np.float16, np.float32, np.float64}


@dataclass(frozen=True, slots=True, eq=False)
class _LeafColumn:
    name: str
    path: tuple[str | int, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    low: NDArray[Any] | None
    high: NDArray[Any] | None
    least: Any
    """`low` as a scalar where all elements share each bound, else None; `most` is the same for `high`."""
    most: Any
    is_box: bool
    """False for choices: a number that is none of them means nothing."""

    def of(self, observations: Sequence[Any]) -> Sequence[Any]:
        for key in self.path:
            observations = [observation[key] for observation in observations]
        return observations

    def rows_of(self, batch: Any, width: int) -> NDArray[Any]:
        """Return this leaf's array in a batch of `width` observations. Raises `EnvContractError`."""
        try:
            for key in self.path:
                batch = batch[key]
            rows = whole_array(batch)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise EnvContractError(_title(self), repr(error), "in the nesting of the space") from error
        if rows.shape != (width, *self.shape) or not _castable(rows, self):
            seen = f"{rows.dtype} {rows.shape}"
            raise EnvContractError(_title(self), seen, f"{self.dtype} {(width, *self.shape)}")
        if not holds(self.dtype, rows):
            raise self.beyond(rows)
        return rows

    def beyond(self, values: NDArray[Any]) -> EnvContractError:
        """Return the error for `values` that the dtype would change."""
        return EnvContractError(_title(self), f"values from {values.min()} to {values.max()}", f"within {self.dtype}")

    def outside(self, rows: NDArray[Any]) -> bool:
        """Return whether an element is outside the bounds, or NaN, with which each comparison is false.

        Extremes take no memory, and for large rows a third of the time of comparing each element.
        """
        if (self.least is not None or self.most is not None) and rows.size:
            return not (
                (self.least is None or np.minimum.reduce(rows, axis=None) >= self.least)
                and (self.most is None or np.maximum.reduce(rows, axis=None) <= self.most)
            )
        if self.low is not None:
            inside = np.count_nonzero(rows >= self.low)
            if self.high is not None:
                return bool(inside + np.count_nonzero(rows <= self.high) != 2 * rows.size)
            return bool(inside != rows.size)
        if self.high is not None:
            return bool(np.count_nonzero(rows <= self.high) != rows.size)
        if self.dtype.kind != "f":
            return False
        # One pass: a sum of squares is NaN exactly if one of them is. `dot` would warn of squares that are infinite.
        return math.isnan(np.vdot(rows, rows))


class Observations:
    """The observations of `width` envs. `columns`: name -> (envs, *shape), the policy's input.

    Each `put` overwrites the columns. The caller may bring them. Values outside a Box are written and told to
    `note_outside`; without it they are refused. NaN is always refused, and an infinity beyond a finite bound. Without
    `check_bounds`, only NaN is.
    """

    def __init__(
        self,
        space: Space,
        width: int,
        *,
        check_bounds: bool = True,
        note_outside: NoteOutside | None = None,
        columns: Mapping[str, NDArray[Any]] | None = None,
    ) -> None:
        self.space = space
        self._note_outside = note_outside
        self._leaves = [
            _leaf(name, path, leaf, check_bounds)
            for (name, leaf), path in zip(leaves(space, "obs"), _paths(space), strict=True)
        ]
        self._blanks = {name: blank_value(name, leaf) for name, leaf in leaves(space, "obs")}
        self.columns: dict[str, NDArray[Any]] = dict(columns or blank_columns(space, "obs", width))

    def blank(self, lanes: Any) -> None:
        """Write a value inside the space into the rows `lanes`, which have no observation now."""
        for name, column in self.columns.items():
            column[lanes] = self._blanks[name]

    def put(self, lanes: LaneIndex, observations: Sequence[Any]) -> list[tuple[int, EnvContractError]]:
        """Write one observation for each of `lanes`. Return (position in `lanes`, error) for each bad one."""
        strays: list[tuple[_LeafColumn, NDArray[Any]]] = []
        for leaf in self._leaves:
            column = self.columns[leaf.name]
            target = column if lanes is None else np.empty((len(lanes), *leaf.shape), leaf.dtype)
            if not _join(leaf, observations, target):
                return self._put_each(lanes, observations)
            if leaf.outside(target):
                strays.append((leaf, target))
            if lanes is not None:
                column[lanes] = target
        return [] if not strays or self._let_pass(strays) else self._put_each(lanes, observations)

    def put_rows(
        self,
        batch: Any,
        lanes: LaneIndex = None,
        *,
        only: Sequence[int] | None = None,
        new: Container[int] | None = None,
    ) -> list[tuple[int, EnvContractError]]:
        """Write one observation for every env, from arrays (envs, *shape) in the nesting of the space.

        `lanes`: the env of each row; None: in order. `only`: the envs whose rows count; None: all. `new`: the envs
        whose observation is another one than before; None: all. Return (env, error) for each bad one.
        Raises `EnvContractError` for a bad batch that is no single env's fault.
        """
        columns = {leaf.name: leaf.rows_of(batch, len(self.columns[leaf.name])) for leaf in self._leaves}
        if only is not None:
            each = _unbatch(self.space, batch, len(next(iter(columns.values()))))
            row_of = {lane: row for row, lane in enumerate(range(len(each)) if lanes is None else lanes.tolist())}
            found = self.put(np.array(only), [each[row_of[lane]] for lane in only])
            return [(only[position], problem) for position, problem in found]
        for name, rows in columns.items():
            self.columns[name][... if lanes is None else lanes] = rows
        strays = [(leaf, self.columns[leaf.name]) for leaf in self._leaves if leaf.outside(self.columns[leaf.name])]
        if strays and not self._let_pass(strays, new):
            problems = self._put_each(lanes, _unbatch(self.space, batch, len(next(iter(columns.values())))))
            return [(at if lanes is None else int(lanes[at]), problem) for at, problem in problems]
        return []

    def _let_pass(self, strays: list[tuple[_LeafColumn, NDArray[Any]]], new: Container[int] | None = None) -> bool:
        """Note rows (rows, *shape) of leaves that have values outside. Return False if one of them must be refused."""
        if self._note_outside is None or not all(leaf.is_box for leaf, _ in strays):
            return False
        outside, farthest = set[int](), Farthest()
        for leaf, rows in strays:
            found = farthest_outside(rows, leaf.low, leaf.high)
            if found is None:
                return False
            where = [row for row in found if new is None or row in new]
            outside.update(where)
            if where:
                farthest[_title(leaf)] = max((found[row] for row in where), key=lambda pair: abs(pair[0] - pair[1]))
        if outside:
            self._note_outside(len(outside), farthest)
        return True

    def _put_each(self, lanes: LaneIndex, observations: Sequence[Any]) -> list[tuple[int, EnvContractError]]:
        problems = []
        for position, observation in enumerate(observations):
            lane = position if lanes is None else lanes[position]
            problem = self._put_one(lane, observation)
            if problem is not None:
                problems.append((position, problem))
                self.blank(lane)
        return problems

    def _put_one(self, lane: int | np.intp, observation: Any) -> EnvContractError | None:
        strays: list[tuple[_LeafColumn, NDArray[Any]]] = []
        for leaf in self._leaves:
            try:
                array = whole_array(leaf.of([observation])[0])
            except BaseException as error:  # noqa: BLE001 - ragged, nested otherwise, or a user's class
                raise_stop(error)
                expected = f"nested as {self.space!r:.120}" if leaf.path else f"{leaf.dtype} {leaf.shape}"
                return EnvContractError("observation", f"{brief(observation)} ({brief(error)})", expected)
            if array.shape != leaf.shape or not _castable(array, leaf):
                seen = f"{array.dtype} {array.shape}"
                return EnvContractError(_title(leaf), seen, f"{leaf.dtype} {leaf.shape}")
            if not holds(leaf.dtype, array):
                return leaf.beyond(array)
            row = array.astype(leaf.dtype)
            if leaf.outside(row):
                strays.append((leaf, row[None]))
            self.columns[leaf.name][lane] = row
        return None if not strays or self._let_pass(strays) else self._refusal(*strays[0])

    def _refusal(self, leaf: _LeafColumn, row: NDArray[Any]) -> EnvContractError:
        wanted = "free of NaN" if np.isnan(row).any() else f"within {_brief(leaf.low)} and {_brief(leaf.high)}"
        if self._note_outside is None and leaf.is_box and np.isfinite(row).all():
            wanted += " where strict_bounds is true"
        return EnvContractError(_title(leaf), f"values from {row.min()} to {row.max()}", wanted)


def _join(leaf: _LeafColumn, observations: Sequence[Any], target: NDArray[Any]) -> bool:
    """Write all values of one leaf at once. Return False if a kind, shape or dtype is wrong."""
    try:
        values = leaf.of(observations)
        if leaf.shape:
            if len(values) == 1 and type(values[0]) is np.ndarray and values[0].dtype == leaf.dtype:
                return _write_row(values[0], target)
            kinds = {*map(type, values)}
            if kinds != _PLAIN and any(issubclass(kind, np.ma.MaskedArray) for kind in kinds):
                return False
            # Numpy takes large integers as safe in float64, though it rounds them.
            if leaf.dtype == np.float64 and {value.dtype.kind for value in values} != {"f"}:
                return False
            # To ask for lengths is faster than for shapes, and `concatenate` refuses another number of axes.
            if len(leaf.shape) == 1:
                if {*map(len, values)} != {leaf.shape[0]}:
                    return False
            elif {value.shape for value in values} != {leaf.shape}:
                return False
            np.concatenate(values, out=target.reshape(-1, *leaf.shape[1:]), casting="safe")
            return True
        scalars = np.array(values)
        if scalars.ndim != 1 or not _castable(scalars, leaf):
            return False
        if scalars.dtype.kind == "f" and not _FLOATS.issuperset(map(type, values)):
            return False  # numpy has rounded large integers among reals
        if scalars.dtype != leaf.dtype and not holds(leaf.dtype, scalars):
            return False
        target[...] = scalars
    except BaseException as error:  # noqa: BLE001 - the methods of a user's objects may raise
        raise_stop(error)
        return False
    return True


def _write_row(value: NDArray[Any], target: NDArray[Any]) -> bool:
    """Do what `_join` does for one value of the leaf's dtype, in fewer steps."""
    if value.shape != target.shape[1:]:
        return False
    target[0] = value
    return True


def _castable(array: NDArray[Any], leaf: _LeafColumn) -> bool:
    """Return whether values of this dtype may stand in the leaf. Scalars may be of other widths, as Python's are."""
    if not leaf.shape and leaf.dtype.kind in "iuf":
        return array.dtype.kind in ("iub" if leaf.dtype.kind in "iu" else "iubf")
    return np.can_cast(array.dtype, leaf.dtype)


def _unbatch(space: Space, batch: Any, width: int) -> list[Any]:
    """Return the rows of a batch, each in the nesting of `space`."""
    if isinstance(space, Dict):
        parts = {key: _unbatch(sub, batch[key], width) for key, sub in space.spaces.items()}
        return [{key: rows[i] for key, rows in parts.items()} for i in range(width)]
    if isinstance(space, Tuple):
        return list(zip(*(_unbatch(sub, batch[i], width) for i, sub in enumerate(space.spaces)), strict=True))
    return list(batch)


def _leaf(name: str, path: tuple[str | int, ...], leaf: Leaf, check_bounds: bool) -> _LeafColumn:
    low, high = leaf_bounds(leaf) if check_bounds else (None, None)
    shared = all(bound is None or (bound == bound.flat[0]).all() for bound in (low, high))
    least, most = (None if bound is None or not shared else bound.flat[0] for bound in (low, high))
    if not shared:  # with an axis for rows: numpy compares arrays of one shape twice as fast, and one row is such
        low, high = (None if bound is None else bound[None] for bound in (low, high))
    return _LeafColumn(name, path, leaf_shape(leaf), column_dtype(leaf), low, high, least, most, isinstance(leaf, Box))


def _paths(space: Space, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Return the keys that lead to each leaf in an observation, in the order of `leaves`."""
    if isinstance(space, Dict):
        return [p for key, sub in space.spaces.items() for p in _paths(sub, (*path, key))]
    if isinstance(space, Tuple):
        return [p for index, sub in enumerate(space.spaces) for p in _paths(sub, (*path, index))]
    return [path]


def _title(leaf: _LeafColumn) -> str:
    return "observation" if not leaf.path else f"observation{''.join(f'[{key!r}]' for key in leaf.path)}"


def _brief(bound: NDArray[Any] | None) -> str:
    return "any" if bound is None else np.array2string(bound.ravel()[:8], separator=", ", threshold=8)
