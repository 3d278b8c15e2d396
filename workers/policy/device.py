"""A device other than the CPU, as a GPU: is it there, and what goes to it and back in one copy."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headrace.schemas.errors import ConfigError
from headrace.workers.policy.module_weights import State, write_tensors

log = logging.getLogger(__name__)

Kind = tuple[torch.dtype, tuple[int, ...]]
"""The dtype and shape of a tensor."""

_ALIGN = 64
"""The first byte of each tensor in a block is a multiple of it, so that any dtype can be read there."""


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

    def write_weights(self, module: torch.nn.Module, state: State) -> None:
        """Do what `module_weights.write_weights` does, by one copy of all tensors, and without waiting for it.

        No pass is under way. The next one waits on the device.
        """
        own = module.state_dict()
        block = Block(self, [_kind(tensor) for tensor in own.values()])  # torch keeps its memory until it is copied
        write_tensors(dict(zip(own, block.here, strict=True)), state)
        block.send()
        with torch.no_grad():
            for tensor, there in zip(own.values(), block.there, strict=True):
                tensor.copy_(there)
        self.versions += 1

    def fetch(self, tensors: Sequence[Tensor], block: Block | None = None) -> tuple[list[Tensor], Block]:
        """Return copies of `tensors` on the CPU, made by one copy. A `block` of an earlier call is used again."""
        kinds = [_kind(tensor) for tensor in tensors]
        if block is None or block.kinds != kinds:
            block = Block(self, kinds)
        for there, tensor in zip(block.there, tensors, strict=True):
            there.copy_(tensor)
        return block.fetch(), block


class Block:
    """Tensors of these `kinds` side by side in one block of bytes here, and in one on the device."""

    def __init__(self, device: Device, kinds: Sequence[Kind]) -> None:
        self.kinds = list(kinds)
        self._device = device
        self._starts, size = [], 0
        for dtype, shape in kinds:
            self._starts.append(size)
            size += -(-math.prod(shape) * dtype.itemsize // _ALIGN) * _ALIGN
        self._here = device.block(size)
        self._there = torch.empty(size, dtype=torch.uint8, device=device.place)
        self.here, self.there = self._parts(self._here), self._parts(self._there)

    def _parts(self, block: Tensor) -> list[Tensor]:
        return [
            block[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for start, (dtype, shape) in zip(self._starts, self.kinds, strict=True)
        ]

    def send(self) -> None:
        """Queue the copy of `here` into `there`. Until it is done, leave `here` as it is."""
        self._there.copy_(self._here, non_blocking=True)

    def fetch(self) -> list[Tensor]:
        """Copy `there` here when all queued work is done, and return the tensors in new memory."""
        self._here.copy_(self._there, non_blocking=True)
        self._device.wait()
        return self._parts(self._here.clone())


def _kind(tensor: Tensor) -> Kind:
    return tensor.dtype, tuple(tensor.shape)


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


def each_elsewhere(answer: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return nested dicts, lists and tuples with `change` of each tensor that is not on the CPU, in order."""
    if isinstance(answer, Tensor):
        return answer if answer.is_cpu else change(answer)
    if isinstance(answer, Mapping):
        return {name: each_elsewhere(part, change) for name, part in answer.items()}
    return [each_elsewhere(part, change) for part in answer] if isinstance(answer, list | tuple) else answer
