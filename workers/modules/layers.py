"""Layers initialised from a given generator, so that building a module neither reads nor changes global state.

torch writes first values of its own into each layer, from its global generator. They are replaced, and the generator's
state is put back. Layers on the device "meta", which have no values, make a process import sympy, half a second of its
start.
"""

from __future__ import annotations

import torch
from torch import nn


def linear(inputs: int, outputs: int, gain: float, generator: torch.Generator) -> nn.Linear:
    """Return a linear layer with orthogonal weights times `gain` and zero bias."""
    with torch.random.fork_rng(devices=()):
        layer = nn.Linear(inputs, outputs)
    _initialise(layer, gain, generator)
    return layer


def conv(inputs: int, outputs: int, generator: torch.Generator) -> nn.Conv2d:
    """Return a 3 x 3 convolution with orthogonal weights for a ReLU and zero bias.

    It halves height and width, rounded up.
    """
    with torch.random.fork_rng(devices=()):
        layer = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1)
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
