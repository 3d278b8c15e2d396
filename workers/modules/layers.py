"""Layers initialised from a given generator, so that building a module neither reads nor changes global state.

torch can leave a layer blank by the device "meta". The device makes a process import sympy, half a second of its start.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

from headrace.schemas.errors import ModuleError
from headrace.schemas.frames.wire_limits import DEFAULT_LIMITS

_MOST_LAYERS = DEFAULT_LIMITS.arrays // 2
_BYTES_OF_WEIGHT = 4


def layer_sizes(inputs: int, hidden: Sequence[int], name: str = "hidden") -> list[tuple[int, int]]:
    """Return the (inputs, outputs) of each layer of `hidden` units.

    Raises `ModuleError` for a layer without units, and for weights that no message to workers could hold. The sizes may
    come from a stranger's file, so judge them before a layer takes memory.
    """
    if len(hidden) > _MOST_LAYERS:
        raise ModuleError(f"{name} has {len(hidden):,} layers; give {_MOST_LAYERS:,} at most")
    if wrong := [size for size in hidden if type(size) is not int or size < 1]:
        raise ModuleError(
            f"{name} = {list(hidden)!r:.200} has a layer of {wrong[0]!r:.40} units; give positive integers"
        )
    sizes = list(pairwise((inputs, *hidden)))
    if (nbytes := _BYTES_OF_WEIGHT * sum(a * b for a, b in sizes)) > DEFAULT_LIMITS.payload_bytes:
        raise ModuleError(
            f"{name} = {list(hidden)!r:.200} makes weights of {nbytes >> 20:,} MiB; a version of weights has "
            f"{DEFAULT_LIMITS.payload_bytes >> 20} MiB at most, so give fewer or smaller layers"
        )
    return sizes


class BlankLinear(nn.Linear):
    """Linear layer without initial values: the caller writes its parameters."""

    def reset_parameters(self) -> None:
        """Leave the parameters uninitialised."""


class BlankConv2d(nn.Conv2d):
    """Convolution without initial values: the caller writes its parameters."""

    def reset_parameters(self) -> None:
        """Leave the parameters uninitialised."""


class BlankLSTM(nn.LSTM):
    """LSTM without initial values: the caller writes its parameters."""

    def reset_parameters(self) -> None:
        """Leave the parameters uninitialised."""


def linear(inputs: int, outputs: int, gain: float, generator: torch.Generator) -> nn.Linear:
    """Return a linear layer with orthogonal weights times `gain` and zero bias."""
    layer = BlankLinear(inputs, outputs)
    _initialise(layer, gain, generator)
    return layer


def conv(inputs: int, outputs: int, generator: torch.Generator) -> nn.Conv2d:
    """Return a 3 x 3 convolution with orthogonal weights for a ReLU and zero bias.

    It halves height and width, rounded up.
    """
    layer = BlankConv2d(inputs, outputs, 3, stride=2, padding=1)
    _initialise(layer, 2**0.5, generator)
    return layer


def _initialise(layer: nn.Linear | nn.Conv2d, gain: float, generator: torch.Generator) -> None:
    weight = layer.weight
    with torch.no_grad():
        weight.copy_(gain * orthogonal(weight.shape[0], weight[0].numel(), generator).reshape(weight.shape))
        if layer.bias is not None:
            layer.bias.zero_()


def orthogonal(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    """Return float32 (rows, columns) with orthonormal rows or columns, whichever are fewer."""
    tall = torch.empty(max(rows, columns), min(rows, columns)).normal_(generator=generator)
    q: torch.Tensor
    q, r = torch.linalg.qr(tall)
    q = q * torch.sign(torch.diagonal(r))  # makes the draw uniform over all such matrices
    return q if rows >= columns else q.T
