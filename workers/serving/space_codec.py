"""The codec of one space: observations or actions as JSON, as arrays of a message, and in the nesting of the space.

It checks all values against the space, so that a client is told of its mistake and the sampler does not fail. Client
and server both use it. It needs no gymnasium.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.chunks.spaces import Box, Dict, Space, Tuple, column_dtype, leaf_shape, leaf_values, leaves, nest
from headrace.schemas.errors import EnvContractError
from headrace.schemas.frames.wire import Buffer
from headrace.workers.envs.bounds import farthest_outside, holds, leaf_bounds, whole_array
from headrace.workers.envs.observations import Farthest, NoteOutside
from headrace.workers.serving.row_layout import row_layout_of

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True, eq=False)
class _LeafCodec:
    title: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    low: NDArray[Any] | None
    high: NDArray[Any] | None
    may_leave: bool
    """Whether finite values outside the bounds are taken."""

    def check(self, array: NDArray[Any], outside: Farthest) -> NDArray[Any]:
        """Return a sound array. Add one that leaves its Box, and may, to `outside`."""
        if array.shape != self.shape:
            raise self.refused(f"shape {array.shape}", f"{self.dtype} {self.shape}")
        if self.is_sound(array):
            return array
        if self.may_leave and (found := farthest_outside(array[None], self.low, self.high)) is not None:
            for far in found.values():
                outside[self.title] = far
            return array
        if self.dtype.kind == "f" and np.isnan(array).any():
            raise self.refused("NaN", "free of NaN")
        raise self.refused(f"values from {array.min()} to {array.max()}", f"within {self.low} and {self.high}")

    def is_sound(self, array: NDArray[Any]) -> bool:
        """Return whether all numbers are within bounds and not NaN. `array` is one row or many."""
        low, high = self.low, self.high
        if low is None and high is None and self.dtype.kind != "f":
            return True
        sound = array == array if low is None else array >= low  # NaN does not equal itself
        if high is not None:
            sound &= array <= high
        return b"\0" not in sound.tobytes()  # for a few numbers, the usual case, faster than .all()

    def numbers(self, values: Sequence[Any]) -> NDArray[Any] | None:
        """Read rows of floats, given as lists or numbers, all at once; None if each must be read by itself."""
        if self.dtype.kind != "f" or _has_text(values):
            return None
        try:
            array = np.asarray(values)
        except ValueError:  # lists of different lengths
            return None
        if array.dtype.kind not in "iuf" or array.shape != (len(values), *self.shape) or not holds(self.dtype, array):
            return None
        array = array.astype(self.dtype)
        return array if self.is_sound(array) else None

    def refused(self, seen: str, expected: str) -> EnvContractError:
        return EnvContractError(self.title, f"{seen:.200}", f"{expected:.200}")


class SpaceCodec:
    """Reads and writes values of one space. `root`, "obs" or "actions", is the name of their arrays.

    A row is a dict of arrays by name, for one value. Returned arrays belong to the caller, except those of
    `row_from_arrays`, which are views of its argument. All methods raise `EnvContractError`.
    """

    def __init__(
        self, space: Space, root: str, *, check_bounds: bool = True, note_outside: NoteOutside | None = None
    ) -> None:
        self.space = space
        self.root = root
        self._note_outside = note_outside
        self._leaves: dict[str, _LeafCodec] = {}
        for name, leaf in leaves(space, root):
            low, high = leaf_bounds(leaf) if check_bounds else (None, None)
            may_leave = isinstance(leaf, Box) and note_outside is not None
            self._leaves[name] = _LeafCodec(name, leaf_shape(leaf), column_dtype(leaf), low, high, may_leave)
        self.layout = row_layout_of({name: (leaf.dtype, leaf.shape) for name, leaf in self._leaves.items()})
        """The usual layout of the arrays in a message, if they are small. Clients may send other layouts."""

    def read(self, value: Any) -> Any:
        """Convert lists, numbers and arrays to the nesting and dtypes of the space. A Tuple may be a list."""
        outside = Farthest()
        read = self._read(self.space, value, self.root, outside)
        self._tell(outside)
        return read

    def _tell(self, outside: Farthest) -> None:
        if outside and self._note_outside is not None:
            self._note_outside(1, outside)

    def from_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> Any:
        """Convert the arrays of a message to a value. They must have exactly the dtypes of the space."""
        row = {name: array.copy() for name, array in self.row_from_arrays(arrays).items()}
        return nest(self.space, row, self.root)

    def row_from_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Return the row of this space among the arrays of a message, without a copy. Dtypes as in `from_arrays`."""
        found, outside = {}, Farthest()
        for name, array in arrays.items():
            if name.split("/", 1)[0] == self.root:
                leaf = self._leaves.get(name)
                if leaf is not None and array.dtype != leaf.dtype:
                    raise leaf.refused(f"{array.dtype}", f"{leaf.dtype} {leaf.shape}")
                found[name] = array if leaf is None else leaf.check(array, outside)
        if found.keys() != self._leaves.keys():
            raise EnvContractError(self.root, f"{sorted(found)!r:.200}", f"{sorted(self._leaves)!r:.200}")
        self._tell(outside)
        return found

    def rows_from_payloads(self, payloads: Sequence[Buffer]) -> Sequence[dict[str, NDArray[Any]] | EnvContractError]:
        """Return the row, or the error, of each payload. The payloads must have the `layout`."""
        assert self.layout is not None, "only payloads with a layout come here"
        columns, sound = self.layout.read(payloads), True
        for name, column in columns.items():
            sound = sound and self._leaves[name].is_sound(column)
        rows = [{name: column[i, ...] for name, column in columns.items()} for i in range(len(payloads))]
        return rows if sound else [row_or_error(self.row_from_arrays, row) for row in rows]

    def read_row(self, value: Any) -> dict[str, NDArray[Any]]:
        """Convert lists, numbers and arrays to a row."""
        return self.to_arrays(self.read(value))

    def read_rows(self, values: Sequence[Any]) -> list[dict[str, NDArray[Any]] | EnvContractError]:
        """Return what `read_row` returns or raises for each value. A single array of floats is read all at once."""
        leaf = self._leaves.get(self.root)
        read = leaf.numbers(values) if leaf is not None else None
        if read is None:
            return [row_or_error(self.read_row, value) for value in values]
        return [{self.root: read[i, ...]} for i in range(len(values))]

    def to_arrays(self, value: Any) -> dict[str, NDArray[Any]]:
        """Convert a value in the nesting of the space to the arrays of a message."""
        if self.root in self._leaves:  # a space of one array, the usual case
            return {self.root: np.asarray(value, self._leaves[self.root].dtype)}
        parts = zip(self._leaves.items(), leaf_values(self.space, value), strict=True)
        return {name: np.asarray(part, leaf.dtype) for (name, leaf), part in parts}

    def to_json(self, value: Any) -> Any:
        """Convert a value in the nesting of the space to lists and numbers."""
        if isinstance(value, dict):
            return {key: self.to_json(part) for key, part in value.items()}
        if isinstance(value, tuple):
            return [self.to_json(part) for part in value]
        return np.asarray(value).tolist()

    def _read(self, space: Space, value: Any, name: str, outside: Farthest) -> Any:
        if isinstance(space, Dict):
            if not isinstance(value, dict) or value.keys() != space.spaces.keys():
                raise EnvContractError(name, f"{value!r:.100}", f"an object of {list(space.spaces)!r:.200}")
            return {key: self._read(sub, value[key], f"{name}/{key}", outside) for key, sub in space.spaces.items()}
        if isinstance(space, Tuple):
            if not isinstance(value, list | tuple) or len(value) != len(space.spaces):
                raise EnvContractError(name, f"{value!r:.100}", f"a list of {len(space.spaces)}")
            return tuple(self._read(sub, value[i], f"{name}/{i}", outside) for i, sub in enumerate(space.spaces))
        return _array(self._leaves[name], value, outside)


def _has_text(values: Sequence[Any]) -> bool:
    """Return whether lists of JSON contain text.

    NumPy would make every item as wide as the widest text: a body of some hundred kilobytes could use up all memory.
    """
    kinds = set(map(type, values))
    while kinds == {list}:  # lists beside other items make no array
        values = [*chain.from_iterable(values)]
        kinds = set(map(type, values))
    return str in kinds


def _array(leaf: _LeafCodec, value: Any, outside: Farthest) -> NDArray[Any]:
    if _has_text([value]):
        raise leaf.refused("text", f"{leaf.dtype} {leaf.shape}")
    try:
        array = whole_array(value)
    except ValueError as error:
        seen = "masked elements" if isinstance(value, np.ma.MaskedArray) else "lists of different lengths"
        raise leaf.refused(seen, f"{leaf.dtype} {leaf.shape}") from error
    if array.size == 0 and not leaf.shape.count(0):
        raise leaf.refused(f"shape {array.shape}", f"{leaf.dtype} {leaf.shape}")
    if array.dtype.kind not in ("biuf" if leaf.dtype.kind == "f" else "biu"):
        raise leaf.refused(f"{array.dtype} {array.shape}", f"{leaf.dtype} {leaf.shape}")
    if not holds(leaf.dtype, array):
        raise leaf.refused(f"values from {array.min()} to {array.max()}", f"{leaf.dtype} {leaf.shape}")
    return leaf.check(array.astype(leaf.dtype), outside)


def read_each(read_all: Callable[[Sequence[Any]], Sequence[Any]], values: Sequence[Any]) -> Sequence[Any]:
    """Return what `read_all` returns. If it raises, read each value alone: an exception takes the place of its row."""
    try:
        return read_all(values)
    except Exception as error:  # noqa: BLE001  one value must not cost the other clients their step
        return [error] if len(values) == 1 else [row for value in values for row in read_each(read_all, [value])]


def row_or_error(read: Callable[[Any], Row], value: Any) -> Row | EnvContractError:
    """Return what `read` returns or raises."""
    try:
        return read(value)
    except EnvContractError as error:
        return error
