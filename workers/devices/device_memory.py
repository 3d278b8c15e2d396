"""The state of a recurrent module that acts on a device other than the CPU, where it stays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.workers.devices.device import Device
from headrace.workers.policy.recurrent import check_initial_state, check_state_out, read_initial_state


class DeviceMemory:
    """What `Memory` is, with its rows on `device`.

    They come here, all in one copy, only where a chunk begins within an episode. Which lanes begin and act goes there
    with each pass. The initial state is read once for each version of the weights.
    """

    def __init__(self, module: Any, width: int, device: Device) -> None:
        """Read the module's initial state. Raises `ModuleError` unless `initial_state()` returns tensors by name."""
        self._module, self.width, self._device = module, width, device
        self._take_initial(read_initial_state(module))
        self._rows = {name: row.repeat(width, *[1] * (row.ndim - 1)) for name, row in self._initial_there.items()}
        self._before = self._rows
        self._begun: dict[int, dict[str, NDArray[Any]]] = {}
        """As in `Memory`."""
        self._here: dict[bool, dict[str, NDArray[Any]]] = {}
        """Copies of `_rows` (False) and `_before` (True), until these change."""

    def _take_initial(self, initial: dict[str, NDArray[Any]]) -> None:
        """Keep an initial state here and on the device, (1, ...) each part."""
        self._initial, self._version = {name: row[None] for name, row in initial.items()}, self._device.versions
        place = self._device.place
        self._initial_there = {name: torch.from_numpy(row.copy()).to(place) for name, row in self._initial.items()}

    def _read_initial(self) -> None:
        if self._version != self._device.versions:
            initial = read_initial_state(self._module)
            check_initial_state(self._module, initial, {name: row.shape[1:] for name, row in self._initial.items()})
            self._take_initial(initial)

    def follow(self, earlier: DeviceMemory) -> None:
        """Copy the state of `earlier` into the first lanes. There may be more lanes after them."""
        self._begun = earlier._begun
        self._before = {name: rows.clone() for name, rows in self._before.items()}
        for ours, theirs in ((self._rows, earlier._rows), (self._before, earlier._before)):
            for name, rows in theirs.items():
                ours[name][: len(rows)] = rows
        self._here = {}

    def reset(self, lanes: Sequence[int] | NDArray[np.intp]) -> None:
        """Begin an episode in each of `lanes`."""
        self._begun.update({int(lane): {} for lane in lanes})

    def of(self, lane: int, *, before: bool = False) -> dict[str, NDArray[Any]]:
        """Return a copy of the lane's state now, or of that `before` its last step.

        That of an episode without a step changes until its first step, if other weights choose that.
        """
        if lane in self._begun:
            self._read_initial()
            self._begun[lane] = state = _row(self._initial, 0)
            return state
        if before not in self._here:
            rows = self._before if before else self._rows
            fetched, _ = self._device.fetch(list(rows.values()))
            self._here[before] = {name: part.numpy() for name, part in zip(rows, fetched, strict=True)}
        return _row(self._here[before], lane)

    def mark(self, begun: NDArray[np.bool_], acting: NDArray[np.bool_], lanes: NDArray[np.intp] | None) -> None:
        """Write into `begun`, bool (width,), which lanes have no step yet, and into `acting` which ones act.

        These are `lanes` (None: all).
        """
        self._read_initial()
        begun[...] = False
        begun[list(self._begun)] = True
        acting[...] = lanes is None
        if lanes is not None:
            acting[lanes] = True
        for given in self._begun.values():
            if given:
                given.update(_row(self._initial, 0))

    def tensors(self, begun: Tensor, lanes: Tensor | None) -> dict[str, Tensor]:
        """Return the state of `lanes` (None: all) for a pass, with the initial state in the lanes that `begun` marks.

        Both are on the device.
        """
        if self._begun:
            self._rows = {
                name: torch.where(_beside(begun, rows), self._initial_there[name], rows)
                for name, rows in self._rows.items()
            }
        return self._rows if lanes is None else {name: rows[lanes] for name, rows in self._rows.items()}

    def take(self, state_out: Any, acting: Tensor, lanes: NDArray[np.intp] | None, lanes_there: Tensor | None) -> None:
        """Keep the "state_out" of a forward pass, for the lanes that `acting` marks on the device.

        `lanes` are those of the pass that act (None: all); `lanes_there` are all of the pass. Raises `ModuleError` for
        other names or shapes.
        """
        count = self.width if lanes_there is None else len(lanes_there)
        check_state_out(state_out, {name: (count, *rows.shape[1:]) for name, rows in self._rows.items()})
        acted = self._begun.keys() if lanes is None else set(lanes.tolist())
        self._begun = {lane: given for lane, given in self._begun.items() if lane not in acted}
        before, rows = self._before, self._rows
        self._before, self._rows, self._here = {}, {}, {}
        for name, old in rows.items():
            new = state_out[name].to(old.dtype)
            if lanes_there is not None:
                new = old.index_copy(0, lanes_there, new)
            acts = _beside(acting, old)
            self._before[name] = torch.where(acts, old, before[name])
            self._rows[name] = torch.where(acts, new, old)


def _row(rows: Mapping[str, NDArray[Any]], lane: int) -> dict[str, NDArray[Any]]:
    return {name: part[lane].copy() for name, part in rows.items()}


def _beside(flags: Tensor, rows: Tensor) -> Tensor:
    """Return flags (width,) in the shape (width, 1, ...) of as many axes as `rows`."""
    return flags.view(-1, *[1] * (rows.ndim - 1))
