"""A device that computes on the CPU and behaves as a GPU: it counts copies and waits, and refuses to mix devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from headrace.workers.devices.device import Device
from headrace.workers.devices.open_device import OpenDevice

PLACE = torch.device("meta")
"""The name of the device. torch has no tensors of values there, so none can be read but by a copy that is counted."""
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd  # type: ignore[attr-defined]
_COPIES = {"aten::copy_", "aten::_to_copy"}
_READS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select"}
"""Operations whose answer a GPU's program waits for."""


class There(torch.Tensor):
    """A tensor on the stand-in device. `held` has its values."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> There:
        made: There = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=PLACE,
        )
        made.held = held
        return made

    def numpy(self, *, force: bool = False) -> Any:
        """Do what torch does for a GPU's tensors."""
        if not force:
            raise TypeError(f"can't convert {PLACE} device type tensor to numpy. Use Tensor.cpu() first")
        return self.detach().cpu().numpy()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("the mode `StandIn` takes every operation first")


@dataclass
class Counts:
    """How often something went to the device, came back, or was waited for."""

    there: int = 0
    back: int = 0
    waits: int = 0


class StandIn(TorchDispatchMode):
    """Runs operations of the device on the CPU, and counts in `counts`."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()
        self.on_its_way: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Copies back, (to, from), that nobody has waited for."""

    def take(self) -> Counts:
        """Return what was counted since the last call."""
        counts, self.counts = self.counts, Counts()
        return counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE):
            with self:  # in inference mode torch asks for composite operations too
                return func._op_dk(_COMPOSITE, *args, **kwargs)  # `decompose` prefers Python's, wrong in torch 2.4
        name = func.name().partition(".")[0]
        goes = torch.device(kwargs["device"]) == PLACE if kwargs.get("device") is not None else None
        if goes:
            kwargs["device"] = torch.device("cpu")
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        there = [isinstance(leaf, There) for leaf in given]
        blocks = not (kwargs.get("non_blocking") or (name == "aten::copy_" and args[2:] and args[2]))
        self._count(name, there, goes, blocks=blocks)
        if name == "aten::copy_" and there == [False, True] and not blocks:
            self.on_its_way.append((given[0], given[1].held.clone()))  # type: ignore[attr-defined]
            return given[0]
        if any(there) and name not in _COPIES:
            strange = [leaf for leaf, is_there in zip(given, there, strict=True) if not is_there and leaf.dim()]
            if strange:
                raise RuntimeError(f"Expected all tensors to be on the same device, but {name} got cpu and {PLACE}")
        answer = func(*tree_map(_held, tuple(args)), **tree_map(_held, kwargs))
        wraps = goes if goes is not None else bool(there and there[0]) if name in _COPIES else any(there)
        if not wraps:
            return answer
        owners = {id(leaf.held): leaf for leaf in given if isinstance(leaf, There)}
        of_normal = func.is_view and not given[0].is_inference()
        with torch.inference_mode(torch.is_inference_mode_enabled() and not of_normal):  # as torch's own views
            return tree_map(lambda part: _wrapped(part, owners), answer)

    def _count(self, name: str, there: Sequence[bool], goes: bool | None, *, blocks: bool) -> None:
        if name == "aten::copy_":
            to, from_ = there[0], there[1]
        elif goes is not None and there:
            to, from_ = goes, there[0]
        else:
            to = from_ = False
        reads = name in _READS and any(there)
        self.counts.there += to and not from_
        self.counts.back += (from_ and not to) or reads
        self.counts.waits += (to is not from_ and blocks) or reads


def _held(leaf: Any) -> Any:
    return leaf.held if isinstance(leaf, There) else leaf


def _wrapped(part: Any, owners: Mapping[int, There]) -> Any:
    if not isinstance(part, torch.Tensor):
        return part
    return owners[id(part)] if id(part) in owners else There(part)


class StandInDevice(Device):
    """The `Device` of a `StandIn`."""

    def __init__(self, mode: StandIn) -> None:
        super().__init__(PLACE)
        self._mode = mode

    def block(self, size: int) -> torch.Tensor:
        """Return ordinary memory."""
        return torch.empty(size, dtype=torch.uint8)

    def wait(self) -> None:
        """Finish the copies back, and count it."""
        self._mode.counts.waits += 1
        for here, values in self._mode.on_its_way:
            here.copy_(values)
        self._mode.on_its_way = []


@contextmanager
def stand_in(monkeypatch: Any) -> Iterator[StandIn]:
    """Let `device = "cuda"` of runners mean the stand-in, within the block."""
    with StandIn() as mode:
        device = OpenDevice(StandInDevice(mode))
        opened = lambda name: device if name != "cpu" else None  # noqa: E731
        monkeypatch.setattr("headrace.workers.devices.open_device.open_device", opened)
        yield mode
