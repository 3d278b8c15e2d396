"""Layers of torch, and the same ones computed by numpy.

They are initialised from a given generator, so that building a module neither reads nor changes global state.

torch writes first values of its own into each layer, from its global generator. They are replaced, and the generator's
state is put back. Layers on the device "meta", which have no values, make a process import sympy, half a second of its
start.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

Array = NDArray[Any]


def linear(inputs: int, outputs: int, gain: float, generator: torch.Generator) -> nn.Linear:
    """Return a linear layer with orthogonal weights times `gain` and zero bias."""
    with torch.random.fork_rng(devices=()):
        layer = nn.Linear(inputs, outputs)
    _initialise(layer, gain, generator)
    return layer


def mlp(sizes: Sequence[int], activation: type[nn.Module], generator: torch.Generator) -> nn.Sequential:
    """Return linear layers from each of `sizes` to the next, each with an activation behind it."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [linear(inputs, outputs, 2**0.5, generator), activation()]
    return nn.Sequential(*layers)


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


class KeptLayers:
    """Linear layers over vectors of floats, computed by numpy in arrays that this keeps.

    For a few rows, calls of numpy and new arrays cost more than the arithmetic. An activation follows each layer but
    the last, the head.

    `layers` are the weights (inputs, outputs) and the bias of each layer. They share the module's memory, so weights
    copied in place take effect at once.
    """

    def __init__(self, layers: Sequence[tuple[Array, Array]], *, relu: bool) -> None:
        self._layers = layers
        self._relu = relu
        self.outputs: int = layers[-1][0].shape[1]
        self.make_room(0)

    def make_room(self, rows: int) -> None:
        """Take so many rows from now on."""
        arrays = [np.empty((rows, weight.shape[1]), np.float32) for weight, _ in self._layers]
        # Biases have a row axis: numpy adds arrays of one shape twice as fast as it broadcasts, and one row is such.
        *self._hidden, self._head = [(w, bias[None], y) for (w, bias), y in zip(self._layers, arrays, strict=True)]

    def write(self, x: Array, outputs: Array) -> None:
        """Write the head's outputs for `x` (rows, inputs) into `outputs`, float32 (rows, outputs)."""
        if x.dtype != np.float32:
            x = x.astype(np.float32)
        for weight, bias, y in self._hidden:
            x.dot(weight, y)  # the function of numpy first asks whether another library has one
            np.add(y, bias, y)
            x = np.maximum(y, 0.0, out=y) if self._relu else np.tanh(y, y)
        weight, bias, y = self._head
        x.dot(weight, y)
        np.add(y, bias, outputs)
