"""Actions of a small MLP in two parts: the actions at each step, and the other columns for a whole fragment at once.

For a few envs, calls of numpy cost more than their arithmetic. So `choose` does at each step only what the choice
needs, in arrays that it keeps. `complete` makes the other columns from the recorded outputs. The plain twin is
`ActorCritic`'s function that makes all columns at once; tests compare the two to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.chunks.spaces import Discrete
from headrace.workers.modules.distributions import Gaussian, choice_logp, normal_logp
from headrace.workers.modules.layers import KeptLayers
from headrace.workers.policy.module_protocol import OUTPUTS, NumpyAct

Array = NDArray[Any]
_TWO = 2


class ChoiceAct:
    """A `SplitAct` of one Discrete action, by an MLP with shared layers over a vector of floats.

    - whole: the plain twin, which makes all columns.
    - layers: their head has a logit for each choice, and the value last.
    """

    def __init__(self, whole: NumpyAct, layers: KeptLayers, action: Discrete) -> None:
        self._whole = whole
        self._layers = layers
        self._start = action.start
        self._make_room(0)

    def __call__(self, columns: Mapping[str, Array], noise: Array | None) -> dict[str, Array]:
        """Return all step columns, in new arrays."""
        return self._whole(columns, noise)

    def choose(self, columns: Mapping[str, Array], noise: Array | None) -> dict[str, Array]:
        """Return `actions`, and the head's outputs (rows, choices + 1), which the next call overwrites."""
        x = columns["obs"]
        outputs = self._outputs
        if len(x) != len(outputs):
            self._make_room(len(x))
            outputs = self._outputs
        self._layers.write(x, outputs)
        index = outputs[:, :-1].argmax(axis=1) if noise is None else self._pick(noise)
        return {"actions": index + self._start if self._start else index, OUTPUTS: outputs}

    def _pick(self, noise: Array) -> NDArray[np.int64]:
        """Return the indices that `distributions.pick` returns for the same noise, by the same arithmetic."""
        mass, top = self._mass, self._top
        if len(mass) == _TWO:
            return self._pick_of_two(noise)
        np.copyto(mass, self._logits)
        np.maximum.reduce(mass, 0, out=top)
        np.subtract(mass, top, mass)
        np.exp(mass, mass)
        np.add.accumulate(mass, 0, None, mass)
        np.multiply(noise[:, 0], self._total, top)
        index: NDArray[np.int64] = np.less_equal(mass, top, self._passed).argmin(0)
        return index

    def _pick_of_two(self, noise: Array) -> NDArray[np.int64]:
        """Do what `_pick` does, for each choice alone: so numpy neither reduces nor broadcasts."""
        (first, second), top = self._mass, self._top
        one, other = self._logits
        np.maximum(one, other, out=top)
        np.subtract(one, top, first)
        np.subtract(other, top, second)
        np.exp(self._mass, self._mass)
        np.add(first, second, second)
        np.multiply(noise[:, 0], second, top)
        index: NDArray[np.int64] = np.less_equal(first, top).astype(np.int64)
        return index

    def complete(self, columns: Mapping[str, Array]) -> dict[str, Array]:
        """Return `logp`, `action_dist_inputs` and `values` for recorded `actions` and outputs, (rows, ...) each."""
        outputs = columns[OUTPUTS]
        logits = np.ascontiguousarray(outputs[:, :-1])
        logp = choice_logp(logits, columns["actions"] - self._start)
        return {"logp": logp, "action_dist_inputs": logits, "values": np.ascontiguousarray(outputs[:, -1])}

    def _make_room(self, rows: int) -> None:
        self._layers.make_room(rows)
        self._outputs = np.empty((rows, self._layers.outputs), np.float32)
        self._logits = self._outputs[:, :-1].T
        self._mass = np.empty(self._logits.shape, np.float32)
        self._total = self._mass[-1]
        self._top = np.empty(rows, np.float32)
        self._passed = np.empty(self._logits.shape, np.bool_)


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
