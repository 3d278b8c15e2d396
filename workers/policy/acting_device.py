"""A device other than the CPU, as modules act on it. `workers/devices` has CUDA's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.schemas.chunks.spaces import Space
from headrace.workers.policy.module_weights import State


class LaneMemory(Protocol):
    """The state of a recurrent module, by lane, wherever it is. `Memory` says what its methods do."""

    def follow(self, earlier: Any) -> None: ...
    def reset(self, lanes: Sequence[int] | NDArray[np.intp]) -> None: ...
    def of(self, lane: int, *, before: bool = False) -> dict[str, NDArray[Any]]: ...


class ModulePass(Protocol):
    """The forward passes of a module on a device."""

    def __call__(
        self, noise: NDArray[np.float32] | None, acting: NDArray[np.intp] | None, count_steps: Callable[[], int]
    ) -> Any:
        """Return the module's answer, with all tensors but its "state_out" on the CPU."""

    def keep(self, state_out: Any, acting: NDArray[np.intp] | None) -> None:
        """Keep the "state_out" of the last pass for the lanes `acting` (None: all). Raises `ModuleError`."""


class ActingDevice(Protocol):
    """A device, and what acts there."""

    place: torch.device

    def memory(self, module: Any, width: int) -> LaneMemory:
        """Return the memory of a recurrent module there. Raises `ModuleError` for a bad initial state."""

    def passes(
        self,
        module: Any,
        space: Space,
        columns: Mapping[str, NDArray[Any]],
        memory: LaneMemory | None,
        lanes: NDArray[np.intp] | None,
    ) -> ModulePass:
        """Move `module` there. Return its passes for the observations of `lanes` in `columns`."""

    def write_weights(self, module: torch.nn.Module, state: State) -> None:
        """Do what `module_weights.write_weights` does, with the module there."""
