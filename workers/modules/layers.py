"""Layers initialised from a given generator, so that building a module neither reads nor changes global state.

torch can leave a layer blank by the device "meta". The device makes a process import sympy, half a second of its start.
"""

from __future__ import annotations

import torch
from torch import nn


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
