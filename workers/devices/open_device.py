"""Whether a device is there, and what acts on it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.schemas.chunks.spaces import Space
from headrace.schemas.errors import ConfigError
from headrace.workers.devices.device import Block, Device, kind_of
from headrace.workers.devices.device_memory import DeviceMemory
from headrace.workers.devices.device_pass import DevicePass
from headrace.workers.policy.acting_device import LaneMemory
from headrace.workers.policy.module_weights import State, write_tensors

log = logging.getLogger(__name__)


class OpenDevice:
    """An `ActingDevice`: the memory, the passes and the weights of modules on `device`."""

    def __init__(self, device: Device) -> None:
        self.place = device.place
        self._device = device

    def memory(self, module: Any, width: int) -> DeviceMemory:
        """Return the memory of a recurrent module, with its rows there. Raises `ModuleError`."""
        return DeviceMemory(module, width, self._device)

    def passes(
        self,
        module: Any,
        space: Space,
        columns: Mapping[str, NDArray[Any]],
        memory: LaneMemory | None,
        lanes: NDArray[np.intp] | None,
    ) -> DevicePass:
        """Move `module` there. Return its passes for the observations of `lanes` in `columns`."""
        return DevicePass(module, self._device, space, columns, cast("DeviceMemory | None", memory), lanes)

    def write_weights(self, module: torch.nn.Module, state: State) -> None:
        """Do what `module_weights.write_weights` does, by one copy of all tensors, and without waiting for it.

        No pass is under way. The next one waits on the device.
        """
        own = module.state_dict()
        block = Block(
            self._device, [kind_of(tensor) for tensor in own.values()]
        )  # torch keeps its memory until it is copied
        write_tensors(dict(zip(own, block.here, strict=True)), state)
        block.send()
        with torch.no_grad():
            for tensor, there in zip(own.values(), block.there, strict=True):
                tensor.copy_(there)
        self._device.versions += 1


def open_device(name: str) -> OpenDevice | None:
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
    return OpenDevice(Device(place))


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
