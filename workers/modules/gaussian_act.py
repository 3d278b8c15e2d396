"""Actions of a small MLP for a Box in two parts: the actions at each step, and the log-densities once a fragment.

`GaussianAct.choose` does at each step only what the choice needs. `GaussianAct.complete` makes the other columns from
the recorded numbers. The plain twin is `ActorCritic`'s function that makes all columns at once; tests compare the two
to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.workers.modules.distributions import Gaussian, normal_logp
from headrace.workers.modules.layers import KeptLayers
from headrace.workers.policy.module_protocol import OUTPUTS, NumpyAct

Array = NDArray[Any]


class GaussianAct:
    """A `SplitAct` of one Box action, by an MLP with shared layers over a vector of floats.

    - whole: the plain twin, which makes all columns.
    - layers: their head has a mean for each element of the action, and the value last.
    - log_std: the log deviations (size,). They share the module's memory, as the layers do.

    A row of `OUTPUTS` holds what may be another at the next step:

        means (size)  ▮▮▮▮ │ value ▮ │ log deviations (size)  ▮▮▮▮ │ normal numbers (size)  ▮▮▮▮
    """

    def __init__(self, whole: NumpyAct, layers: KeptLayers, log_std: Array, gaussian: Gaussian) -> None:
        self._whole = whole
        self._layers = layers
        self._log_std = log_std[None]
        self._gaussian = gaussian
        self._size = len(log_std)
        self._make_room(0)

    def __call__(self, columns: Mapping[str, Array], noise: Array | None) -> dict[str, Array]:
        """Return all step columns, in new arrays."""
        return self._whole(columns, noise)

    def choose(self, columns: Mapping[str, Array], noise: Array | None) -> dict[str, Array]:
        """Return `actions` and `actions_for_env` in new arrays, and `OUTPUTS`, which the next call overwrites."""
        x = columns["obs"]
        if len(x) != len(self._outputs):
            self._make_room(len(x))
        self._layers.write(x, self._of_layers)
        self._log_stds[...] = self._log_std
        self._normal[...] = 0.0 if noise is None else noise
        np.multiply(np.exp(self._log_std), self._normal, self._moves)
        actions = self._gaussian.shaped(self._means + self._moves)
        return {"actions": actions, "actions_for_env": self._gaussian.bounds.to_env(actions), OUTPUTS: self._outputs}

    def complete(self, columns: Mapping[str, Array]) -> dict[str, Array]:
        """Return `logp`, `action_dist_inputs` and `values` for recorded rows of `OUTPUTS`."""
        means, values, log_std, normal = self._parts(columns[OUTPUTS])
        return {
            "logp": normal_logp(normal, log_std),
            "action_dist_inputs": np.concatenate((means, log_std), 1),
            "values": values[:, 0].copy(),
        }

    def _make_room(self, rows: int) -> None:
        size = self._size
        self._layers.make_room(rows)
        self._outputs = np.empty((rows, 3 * size + 1), np.float32)
        self._of_layers = self._outputs[:, : size + 1]
        self._means, _, self._log_stds, self._normal = self._parts(self._outputs)
        self._moves = np.empty((rows, size), np.float32)

    def _parts(self, outputs: Array) -> tuple[Array, Array, Array, Array]:
        """Return views of means, values, log deviations and normal numbers."""
        size = self._size
        return (
            outputs[:, :size],
            outputs[:, size : size + 1],
            outputs[:, size + 1 : 2 * size + 1],
            outputs[:, 2 * size + 1 :],
        )
