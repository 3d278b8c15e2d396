"""A device other than the CPU, as a GPU, and what goes there and back in one copy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

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

    def fetch(self, tensors: Sequence[Tensor], block: Block | None = None) -> tuple[list[Tensor], Block]:
        """Return copies of `tensors` on the CPU, made by one copy. A `block` of an earlier call is used again."""
        kinds = [kind_of(tensor) for tensor in tensors]
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


def kind_of(tensor: Tensor) -> Kind:
    """Return the dtype and shape of a tensor."""
    return tensor.dtype, tuple(tensor.shape)


def each_elsewhere(answer: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return nested dicts, lists and tuples with `change` of each tensor that is not on the CPU, in order."""
    if isinstance(answer, Tensor):
        return answer if answer.is_cpu else change(answer)
    if isinstance(answer, Mapping):
        return {name: each_elsewhere(part, change) for name, part in answer.items()}
    return [each_elsewhere(part, change) for part in answer] if isinstance(answer, list | tuple) else answer
