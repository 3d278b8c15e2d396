"""A device other than the CPU, as a GPU: is it there, and what acts on it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.schemas.chunks.spaces import Space
from headrace.schemas.errors import ConfigError
from headrace.workers.devices.block import Block, kind_of
from headrace.workers.devices.device_memory import DeviceMemory
from headrace.workers.devices.device_pass import DevicePass
from headrace.workers.policy.acting_device import LaneMemory
from headrace.workers.policy.module_weights import State, write_tensors

log = logging.getLogger(__name__)


class Device:
    """The device `place` of modules that act. Work is queued there in order; `wait` waits for all of it."""

    def __init__(self, place: torch.device) -> None:
        self.place = place
        self.versions = 0
        """Number of versions of weights that were written."""

    def block(self, size: int) -> Tensor:
        """Return uint8 (size,) in page-locked memory of this process, from where the device copies by itself."""
        with torch.cuda.device(self.place):  # else the block would belong to the first device
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def wait(self) -> None:
        """Wait until the device has done what was queued."""
        torch.cuda.current_stream(self.place).synchronize()

    def memory(self, module: Any, width: int) -> DeviceMemory:
        """Return the memory of a recurrent module, with its rows here. Raises `ModuleError`."""
        return DeviceMemory(module, width, self)

    def passes(
        self,
        module: Any,
        space: Space,
        columns: Mapping[str, NDArray[Any]],
        memory: LaneMemory | None,
        lanes: NDArray[np.intp] | None,
    ) -> DevicePass:
        """Move `module` to this device. Return its passes for the observations of `lanes` in `columns`."""
        return DevicePass(module, self, space, columns, cast("DeviceMemory | None", memory), lanes)

    def write_weights(self, module: torch.nn.Module, state: State) -> None:
        """Do what `module_weights.write_weights` does, by one copy of all tensors, and without waiting for it.

        No pass is under way. The next one waits on the device.
        """
        own = module.state_dict()
        block = Block(self, [kind_of(tensor) for tensor in own.values()])  # torch keeps its memory until it is copied
        write_tensors(dict(zip(own, block.here, strict=True)), state)
        block.send()
        with torch.no_grad():
            for tensor, there in zip(own.values(), block.there, strict=True):
                tensor.copy_(there)
        self.versions += 1

    def fetch(self, tensors: Sequence[Tensor], block: Block | None = None) -> tuple[list[Tensor], Block]:
        """Return copies of `tensors` on the CPU, made by one copy. A `block` of an earlier call is used again."""
        kinds = [kind_of(tensor) for tensor in tensors]
        if block is None or block.kinds != kinds:
            block = Block(self, kinds)
        for there, tensor in zip(block.there, tensors, strict=True):
            there.copy_(tensor)
        return block.fetch(), block


def open_device(name: str) -> Device | None:
    """Return the device that `sampling.device` calls `name`; None for the CPU.

    Raises `ConfigError`, before anything starts, where this process cannot use it.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return None
    if problem := _problem(name):
        raise ConfigError(f"{name!r} cannot be used here: {problem}, or take 'cpu' or 'auto'", key="sampling.device")
    place = torch.device("cuda" if name == "auto" else name)
    if place.index is None:
        place = torch.device("cuda", torch.cuda.current_device())
    log.info("modules act on %s, %s", place, torch.cuda.get_device_name(place))
    return Device(place)


def _problem(name: str) -> str:
    """Return why this process has no such device, and what to do; "" if it has."""
    if getattr(torch.cuda, "_is_in_bad_fork", bool)():
        return "the program that forked this process had used CUDA before; start the process by spawn"
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        return f"torch {torch.__version__} is built without CUDA; install a build with it"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return f"torch {torch.__version__} sees no device; look at what nvidia-smi prints, and at CUDA_VISIBLE_DEVICES"
    number = int(name.partition(":")[2] or 0)
    return "" if number < count else f"torch sees {count} devices, cuda:0 to cuda:{count - 1}; take one of them"
