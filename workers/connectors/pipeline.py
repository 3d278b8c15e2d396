"""A list of connectors, one feeding the next. It checks every result and names the piece in every error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.basics.stop_event import raise_stop
from headrace.schemas.chunks.spaces import Space, Spaces, column_dtype, leaf_shape, leaves
from headrace.schemas.errors import ConnectorError, HeadraceError, words_of
from headrace.workers.connectors.connector import Columns, Exportable, Freezable, Rows, State, Tensors, build_connector

_Expected = dict[str, tuple[np.dtype[Any], tuple[int, ...]]]


class Pipeline:
    """The pieces of the setting `key`, in the order in which rows pass them. Errors also name `owner`."""

    def __init__(self, key: str, specs: Sequence[Any], owner: str = "") -> None:
        self.key = key
        self._owner = owner
        self.pieces = [build_connector(spec, f"{key}[{i}]") for i, spec in enumerate(specs)]
        self._names = [f"{i}.{type(piece).__name__}" for i, piece in enumerate(self.pieces)]
        self._expected: list[_Expected] = [{} for _ in self.pieces]
        self._held: dict[int, State] = {}
        """States that pieces get back after each pass, because the pipeline is frozen and they know no `freeze`."""

    def connect_observations(self, spaces: Spaces, width: int) -> Spaces:
        """Return the module's spaces, given the env's. The first piece is next to the env."""
        for i in range(len(self.pieces)):
            spaces = self._connect(i, spaces, width)
            self._expected[i] = _rows_of(spaces.observation, "obs")
        return spaces

    def connect_actions(self, spaces: Spaces, width: int) -> Spaces:
        """Return the module's spaces, given the env's. The last piece is next to the env."""
        for i in reversed(range(len(self.pieces))):
            self._expected[i] = _rows_of(spaces.action, "actions")
            spaces = self._connect(i, spaces, width)
        return spaces

    def _connect(self, i: int, spaces: Spaces, width: int) -> Spaces:
        with self._named(i, spaces):
            connected = self.pieces[i].connect(spaces, width)
        if not isinstance(connected, Spaces):
            raise ConnectorError(self._title(i), f"connect gave a {type(connected).__name__}, not Spaces")
        return connected

    def process(self, rows: Rows) -> Columns:
        """Return the columns of `rows` after all pieces. Raises `ConnectorError`."""
        for i, piece in enumerate(self.pieces):
            with self._named(i, rows):
                columns = piece.process(rows)
                if i in self._held:
                    piece.take_update()
                    piece.set_state(self._held[i])
            self._check(i, columns, rows)
            rows = replace(rows, columns=columns)
        return rows.columns

    def reset(self, lanes: NDArray[np.intp]) -> None:
        """Reset all pieces for the episodes that begin in `lanes`. Raises `ConnectorError`."""
        for i, piece in enumerate(self.pieces):
            with self._named(i, lanes):
                piece.reset(lanes)

    def torch_process(self, columns: Tensors, actions: Tensors) -> Tensors:
        """Return the columns after all pieces, which are `Exportable`."""
        for piece in self.pieces:
            assert isinstance(piece, Exportable), "the caller has asked for the first that is not"
            columns = piece.torch_process(columns, actions)
        return columns

    def freeze(self) -> None:
        """Stop all pieces from learning. Raises `ConnectorError`."""
        for i, piece in enumerate(self.pieces):
            with self._named(i, "nothing"):
                if isinstance(piece, Freezable):
                    piece.freeze()
                elif state := piece.get_state():
                    self._held[i] = state

    # -- state --------------------------------------------------------------------------------------------------------

    def get_state(self) -> State:
        """Return the state of all pieces: "0.MeanStd/name" -> array."""
        return self._gather([piece.get_state() for piece in self.pieces])

    def take_update(self) -> State:
        """Return the updates of all pieces, under names as in `get_state`. Raises `ConnectorError`."""
        updates = []
        for i, piece in enumerate(self.pieces):
            with self._named(i, "nothing"):
                updates.append(piece.take_update())
        return self._gather(updates)

    def merge(self, state: State, updates: Sequence[State]) -> State:
        """Return `state` with the `updates` of any runners, under names as in `get_state`. Raises `ConnectorError`."""
        merged = []
        for i, piece in enumerate(self.pieces):
            with self._named(i, "updates"):
                merged.append(piece.merge(self._part(i, state), [self._part(i, update) for update in updates]))
        return self._gather(merged)

    def widen(self, width: int) -> None:
        """Make room for `width` lanes in all pieces; new lanes follow the existing ones. Raises `ConnectorError`."""
        for i, piece in enumerate(self.pieces):
            with self._named(i, width):
                piece.widen(width)

    def check_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Raise `ConnectorError` unless `state` has the names, dtypes and shapes of `get_state`.

        A piece may be absent as a whole: merged updates hold nothing for a piece that has learnt nothing.
        """
        told = {name.partition("/")[0] for name in state}
        own = {name: array for name, array in self.get_state().items() if name.partition("/")[0] in told}
        missing, strange = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
        if missing or strange:
            raise ConnectorError(self.key, f"its state lacks {missing[:5]} and has unknown {strange[:5]}")
        for name, array in own.items():
            other = np.asanyarray(state[name])
            if np.ma.is_masked(other) or (other.dtype, other.shape) != (array.dtype, array.shape):
                due = f"{array.dtype} {array.shape}"
                raise ConnectorError(self.key, f"state {name!r} should be {due}, and is {_seen(other)}")

    def set_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Set a state that `check_state` accepts. Absent pieces keep their state. Raises `ConnectorError`."""
        for i, piece in enumerate(self.pieces):
            if part := self._part(i, state):
                with self._named(i, "its state"):
                    piece.set_state(part)
                if i in self._held:
                    self._held[i] = piece.get_state()

    def _gather(self, parts: Sequence[State]) -> State:
        return {f"{name}/{k}": v for name, part in zip(self._names, parts, strict=True) for k, v in part.items()}

    def _part(self, i: int, state: Mapping[str, NDArray[Any]]) -> State:
        prefix = f"{self._names[i]}/"
        return {name.removeprefix(prefix): array for name, array in state.items() if name.startswith(prefix)}

    # -- failures -----------------------------------------------------------------------------------------------------

    def _title(self, i: int) -> str:
        return f"{self.key}[{i}] ({type(self.pieces[i]).__name__}){self._owner}"

    @contextmanager
    def _named(self, i: int, given: Any) -> Iterator[None]:
        try:
            yield
        except HeadraceError:
            raise
        except BaseException as error:
            raise_stop(error)
            raise ConnectorError(self._title(i), words_of(error), _describe(given)) from error

    def _check(self, i: int, columns: Any, rows: Rows) -> None:
        expected, n = self._expected[i], len(rows.lanes)
        if not isinstance(columns, dict) or columns.keys() != expected.keys():
            names = sorted(columns) if isinstance(columns, dict) else type(columns).__name__
            raise ConnectorError(self._title(i), f"it gave {names}, not {sorted(expected)}", _describe(rows))
        for name, (dtype, shape) in expected.items():
            column = columns[name]
            masked = type(column) is not np.ndarray and np.ma.is_masked(column)  # the type alone is asked in no time
            if masked or column.dtype != dtype or column.shape != (n, *shape):
                reason = f"its column {name!r} should be {dtype} {(n, *shape)}, and is {_seen(column)}"
                raise ConnectorError(self._title(i), reason, _describe(rows))


def _rows_of(space: Space, root: str) -> _Expected:
    return {name: (column_dtype(leaf), leaf_shape(leaf)) for name, leaf in leaves(space, root)}


def _seen(array: NDArray[Any]) -> str:
    return "masked " * np.ma.is_masked(array) + f"{array.dtype} {array.shape}"


def _describe(given: Any) -> str:
    if isinstance(given, Rows):
        columns = ", ".join(f"{name} {column.dtype} {column.shape}" for name, column in given.columns.items())
        return f"{'first ' if given.first else ''}rows of lanes {given.lanes[:8].tolist()}: {columns}"
    return f"{given!r:.200}"
