"""The state of recurrent modules: kept by lane while sampling, read from chunks when learning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.schemas.basics.stop_event import raise_stop
from headrace.schemas.basics.tensor_array import array_of
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.chunk import map_arrays
from headrace.schemas.errors import ModuleError, words_of


class Memory:
    """One row of each part of a module's state for each of `width` lanes, in `rows`.

    An episode begins with the initial state of the weights that choose its first action, whenever these came. Memory
    also keeps the state before each lane's last step, for a chunk that begins with a step chosen earlier.
    """

    def __init__(self, module: Any, width: int) -> None:
        """Read the module's initial state. Raises `ModuleError` unless `initial_state()` returns tensors by name."""
        self._module = module
        self.rows: dict[str, NDArray[Any]] = {
            name: np.repeat(row[None], width, axis=0) for name, row in read_initial_state(module).items()
        }
        self._before = self.rows
        self._begun: dict[int, dict[str, NDArray[Any]]] = {}
        """The state that `of` gave last for each lane whose episode has no step yet."""

    def follow(self, earlier: Memory) -> None:
        """Copy the state of `earlier` into the first lanes. There may be more lanes after them."""
        self._begun = earlier._begun
        self._before = {name: rows.copy() for name, rows in self._before.items()}
        for ours, theirs in ((self.rows, earlier.rows), (self._before, earlier._before)):
            for name, rows in theirs.items():
                ours[name][: len(rows)] = rows

    def reset(self, lanes: Sequence[int] | NDArray[np.intp]) -> None:
        """Begin an episode in each of `lanes`."""
        self._begun.update({int(lane): {} for lane in lanes})
        self._begin()

    def _begin(self) -> None:
        """Write the initial state of the weights in use into lanes without a step, and into what `of` gave of them."""
        initial, lanes = read_initial_state(self._module), list(self._begun)
        check_initial_state(self._module, initial, {name: part.shape[1:] for name, part in self.rows.items()})
        for name, rows in self.rows.items():
            rows[lanes] = initial[name]
        for lane, given in self._begun.items():
            if given:
                given.update({name: rows[lane].copy() for name, rows in self.rows.items()})

    def of(self, lane: int, *, before: bool = False) -> dict[str, NDArray[Any]]:
        """Return a copy of the lane's state now, or of that `before` its last step.

        That of an episode without a step changes until its first step, if other weights choose that.
        """
        state = {name: rows[lane].copy() for name, rows in (self._before if before else self.rows).items()}
        if lane in self._begun:
            self._begun[lane] = state
        return state

    def tensors(self, lanes: NDArray[np.intp] | None = None) -> dict[str, torch.Tensor]:
        """Return `rows` for a forward pass, as tensors of the same memory, or a copy of the rows of `lanes`.

        Raises `ModuleError` for a bad initial state.
        """
        if self._begun:
            self._begin()
        return {name: torch.from_numpy(rows if lanes is None else rows[lanes]) for name, rows in self.rows.items()}

    def take(
        self, state_out: Any, acting: NDArray[np.intp] | None = None, lanes: NDArray[np.intp] | None = None
    ) -> None:
        """Keep the "state_out" of a forward pass of `lanes` (None: all).

        Only lanes that are `acting` (None: all) change their state. Raises `ModuleError` for other names or shapes.
        """
        count = len(next(iter(self.rows.values()))) if lanes is None else len(lanes)
        check_state_out(state_out, {name: (count, *rows.shape[1:]) for name, rows in self.rows.items()})
        # New arrays: the module may have answered its old state, or the new one, as a column too.
        new = {name: array_of(state_out[name]).astype(rows.dtype) for name, rows in self.rows.items()}
        if lanes is not None:
            acting = lanes if acting is None else acting
            new = {name: _spread(part, lanes, self.rows[name]) for name, part in new.items()}
        if self._begun:
            acted = self._begun.keys() if acting is None else set(acting.tolist())
            self._begun = {lane: given for lane, given in self._begun.items() if lane not in acted}
        if acting is None:
            self._before, self.rows = self.rows, new
        else:
            self._before = _with(self._before, acting, self.rows)
            self.rows = _with(self.rows, acting, new)


def read_initial_state(module: Any) -> dict[str, NDArray[Any]]:
    """Return the module's initial state by name. Raises `ModuleError` unless it is a dict of tensors."""
    try:
        return {name: array_of(tensor) for name, tensor in module.initial_state().items()}
    except BaseException as error:
        raise_stop(error)
        raise ModuleError(
            f"initial_state of {type(module).__name__} must give a dict of tensors, one row each ({words_of(error)})"
        ) from error


def check_initial_state(module: Any, initial: Mapping[str, NDArray[Any]], due: Mapping[str, tuple[int, ...]]) -> None:
    """Raise `ModuleError` unless the initial state has the shapes that it had before."""
    if (seen := {name: part.shape for name, part in initial.items()}) != due:
        raise ModuleError(f"initial_state of {type(module).__name__} has other shapes than before: {seen!r:.200}")


def check_state_out(state_out: Any, wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Raise `ModuleError` unless "state_out" has these names and shapes."""
    seen = {n: tuple(t.shape) for n, t in state_out.items()} if isinstance(state_out, dict) else state_out
    if seen != wanted:
        raise ModuleError(f"the policy's 'state_out' should have the shapes {wanted}, and has {seen!r:.200}")


def _with(
    rows: Mapping[str, NDArray[Any]], lanes: NDArray[np.intp], others: Mapping[str, NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    """Return `rows` in new arrays, with the rows of `others` for `lanes`."""
    mixed = {name: part.copy() for name, part in rows.items()}
    for name, part in mixed.items():
        part[lanes] = others[name][lanes]
    return mixed


def _spread(part: NDArray[Any], lanes: NDArray[np.intp], rows: NDArray[Any]) -> NDArray[Any]:
    whole = np.empty_like(rows)
    whole[lanes] = part
    return whole


def sequences(batch: ChunkBatch) -> dict[str, Any]:
    """Return the batch for `forward_train` of a recurrent module: one sequence for each chunk with steps.

    Sequences are in column order, for C chunks of N steps together:

    - "obs": nested tensors (N + C, ...), each chunk's T+1 observations one after another
    - "lengths": int64 (C,), T+1 of each chunk
    - "state_in": {name: (C, ...)}
    - "step_rows": int64 (N,), the row of `obs` before each step

    A batch of end markers alone has no sequence and no "state_in". Raises `ModuleError` for steps without state.
    """
    states = {name: _tensor(state) for name, state in batch.state_in.items()}
    if not states and batch.steps:
        raise ModuleError("a batch without state_in columns was not sampled by a recurrent module")
    lengths = np.diff(batch.obs_offsets)[batch.table["length"] > 0]
    last = np.zeros(int(lengths.sum()), np.bool_)
    last[np.cumsum(lengths) - 1] = True
    return {
        "obs": map_arrays(_tensor, batch.obs),
        "lengths": torch.from_numpy(lengths),
        "state_in": states,
        "step_rows": torch.from_numpy(np.flatnonzero(~last)),
    }


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    # Torch warns about read-only arrays; those of a received batch are read-only.
    return torch.from_numpy(array if array.flags.writeable else array.copy())
