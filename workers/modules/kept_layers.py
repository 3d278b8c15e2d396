"""The layers of a small MLP, computed by numpy in arrays that it keeps.

For a few rows, calls of numpy and new arrays cost more than the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class KeptLayers:
    """Linear layers over vectors of floats: an activation follows each of them but the last, the head.

    `layers` are the weights (inputs, outputs) and the bias of each layer. They share the module's memory, so weights
    copied in place take effect at once.
    """

    def __init__(self, layers: Sequence[tuple[Array, Array]], *, relu: bool) -> None:
        self._layers = layers
        self._relu = relu
        self.outputs: int = layers[-1][0].shape[1]
        """Number of the head's outputs."""
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
