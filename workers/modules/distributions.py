"""Action distributions over any action space: numpy samples from given noise, torch differentiates.

Each distribution has two halves. `act` is for acting: numpy, no random state, the hot path. `logp` and `entropy` are
for learning: torch, on a learner's batch. A nested space is the product of its leaves, whose inputs stand side by side
in one row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.schemas.chunks.spaces import (
    Box,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Space,
    column_dtype,
    leaf_shape,
    leaf_size,
    leaf_values,
    leaves,
    nest,
)
from headrace.workers.envs.bounds import ActionBounds

Array = NDArray[Any]
_HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)
_ILLEGAL = -1e9
"""Logit of a choice that an action mask forbids: finite, yet its probability is exactly 0."""


class Categoricals:
    """Independent categorical choices, one for each element of a Discrete, MultiDiscrete or MultiBinary leaf.

    As a `Gaussian`, it is described by `inputs` numbers a row and sampled from `noise` numbers a row.
    """

    def __init__(self, leaf: Discrete | MultiDiscrete | MultiBinary) -> None:
        self._sizes: tuple[int, ...]
        starts: tuple[int, ...]
        if isinstance(leaf, Discrete):
            self._sizes, starts = (leaf.n,), (leaf.start,)
        elif isinstance(leaf, MultiDiscrete):
            self._sizes, starts = leaf.flat_nvec, leaf.flat_start
        else:
            self._sizes, starts = (2,) * leaf_size(leaf), (0,) * leaf_size(leaf)
        self._shape = leaf_shape(leaf)
        self._dtype = column_dtype(leaf)
        self._starts = np.array(starts)
        self.inputs, self.noise = sum(self._sizes), len(self._sizes)

    def act(self, inputs: Array, noise: Array | None) -> tuple[Array, Array]:
        """Return (actions, log-probabilities (rows,)). Without noise, return the mode."""
        if len(self._sizes) == 1:
            index, logp = pick(inputs, None if noise is None else noise[:, 0])
            if self._starts[0]:
                index = index + self._starts[0]
            return index.astype(self._dtype, copy=False).reshape(-1, *self._shape), logp
        actions = np.empty((len(inputs), len(self._sizes)), self._dtype)
        total = np.zeros(len(inputs), np.float32)
        at = 0
        for k, size in enumerate(self._sizes):
            index, logp = pick(inputs[:, at : at + size], None if noise is None else noise[:, k])
            actions[:, k] = index + self._starts[k]
            total += logp
            at += size
        return actions.reshape(-1, *self._shape), total

    def for_env(self, actions: Array) -> Array:
        """Return `actions`: the env gets the policy's choice."""
        return actions

    def from_env(self, actions: Array) -> Array:
        """Return `actions`: the policy's choice is what the env got."""
        return actions

    def mode(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the most likely actions (rows, *shape), of the policy and of the env."""
        parts = torch.split(inputs, list(self._sizes), dim=-1)
        index = torch.stack([part.argmax(-1) for part in parts], -1) + torch.from_numpy(self._starts)
        dtype = torch.from_numpy(np.empty(0, self._dtype)).dtype
        actions = index.reshape(inputs.shape[0], *self._shape).to(dtype)
        return actions, actions

    def logp(self, inputs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """Return the log-probability (rows,) of actions (rows, *shape)."""
        index = actions.reshape(len(inputs), len(self._sizes)).long() - torch.from_numpy(self._starts).to(inputs.device)
        if len(self._sizes) == 1:
            return torch.log_softmax(inputs, -1).gather(-1, index)[:, 0]
        parts = torch.split(inputs, list(self._sizes), dim=-1)
        chosen = [torch.log_softmax(p, -1).gather(-1, index[:, k : k + 1]) for k, p in enumerate(parts)]
        return torch.cat(chosen, -1).sum(-1)

    def entropy(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the entropy (rows,) in nats."""
        if len(self._sizes) == 1:
            logs = torch.log_softmax(inputs, -1)
            return -(logs.exp() * logs).sum(-1)
        parts = [torch.log_softmax(p, -1) for p in torch.split(inputs, list(self._sizes), dim=-1)]
        return torch.stack([-(p.exp() * p).sum(-1) for p in parts], -1).sum(-1)


def pick(logits: Array, uniforms: Array | None) -> tuple[Array, Array]:
    """Return an index by inverse CDF, and its log-probability.

    The weights are not normalised; the uniform number is scaled to their sum. A number below 1 times a float32 sum
    stays below that sum, so an index of probability 0 is never picked.
    """
    shifted, mass = _masses(logits)
    index = logits.argmax(axis=1) if uniforms is None else (mass <= uniforms * mass[-1]).argmin(axis=0)
    return index, _logp(shifted, mass, index)


def choice_logp(logits: Array, index: Array) -> Array:
    """Return the log-probabilities that `pick` returns where it picks `index` (rows,)."""
    return _logp(*_masses(logits), index)


def _masses(logits: Array) -> tuple[Array, Array]:
    """Return the logits below their row's largest, and the sums of their exponentials: (choices, rows) each."""
    shifted = logits.T.copy()  # a row for each index: numpy is quick along rows, and there may be many lanes
    shifted -= np.maximum.reduce(shifted, axis=0)
    mass = np.exp(shifted)
    np.add.accumulate(mass, axis=0, out=mass)
    return shifted, mass


def _logp(shifted: Array, mass: Array, index: Array) -> Array:
    logp: Array = shifted[index, np.arange(len(index))] - np.log(mass[-1])
    return logp


class Gaussian:
    """Diagonal normal over a Box leaf. Inputs are the means, then the log standard deviations.

    The env gets the action mapped from [-1, 1] to its bounds where both are finite, then clipped to them. For a leaf of
    integers it is also rounded, while the policy's own action stays a float.
    """

    def __init__(self, leaf: Box, noise_kind: Literal["uniform", "normal"]) -> None:
        self.bounds = ActionBounds(leaf)
        self._dtype = np.dtype(np.float32) if self.bounds.whole else self.bounds.dtype
        self._shape, self._size, self._kind = leaf.shape, leaf_size(leaf), noise_kind
        self.inputs, self.noise = 2 * self._size, self._size
        self._is_row = self._dtype == np.float32 and len(leaf.shape) == 1

    def act(self, inputs: Array, noise: Array | None) -> tuple[Array, Array]:
        """Return (actions, log-densities (rows,)). Without noise, return the mean."""
        mean, log_std = inputs[:, : self._size], inputs[:, self._size :]
        if noise is None:
            normal = np.zeros_like(mean)
        elif self._kind == "normal":
            normal = noise
        else:
            normal = torch.special.ndtri(torch.from_numpy(np.clip(noise, 2.0**-25, 1 - 2.0**-24))).numpy()
        return self.shaped(mean + np.exp(log_std) * normal), normal_logp(normal, log_std)

    def shaped(self, actions: Array) -> Array:
        """Return the policy's `actions`, float32 (rows, size), in the leaf's shape and the dtype of the column."""
        return actions if self._is_row else actions.astype(self._dtype, copy=False).reshape(-1, *self._shape)

    def for_env(self, actions: Array) -> Array:
        """Return what the env gets in place of `actions`."""
        return self.bounds.clip(self.bounds.unsquash(actions))

    def from_env(self, actions: Array) -> Array:
        """Return an action that `for_env` maps to `actions`."""
        return self.bounds.squash(actions).astype(self._dtype)

    def mode(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean as the policy's actions (rows, *shape), and what the env gets in their place."""
        mean = inputs[:, : self._size].reshape(inputs.shape[0], *self._shape)
        return mean, self.bounds.torch_clip(self.bounds.torch_unsquash(mean))

    def logp(self, inputs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """Return the log-density (rows,) of actions (rows, *shape)."""
        mean, log_std = torch.split(inputs, self._size, dim=-1)
        scaled = (actions.reshape(len(inputs), self._size).to(mean.dtype) - mean) * torch.exp(-log_std)
        logp: torch.Tensor = -(0.5 * scaled * scaled + log_std + _HALF_LOG_TWO_PI).sum(-1)
        return logp

    def entropy(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the differential entropy (rows,) in nats."""
        return (inputs[..., self._size :] + 0.5 + _HALF_LOG_TWO_PI).sum(-1)


def normal_logp(normal: Array, log_std: Array) -> Array:
    """Return the log-densities (rows,) of actions that are `normal` deviations from their means, (rows, size) each."""
    logp: Array = -(0.5 * normal * normal + log_std + _HALF_LOG_TWO_PI).sum(axis=1)
    return logp


_Part = Categoricals | Gaussian
"""The distribution of one leaf."""


class ActionDistribution:
    """The product of the distributions of a space's leaves.

    A row is described by `inputs` numbers and sampled from `noise` numbers.
    """

    def __init__(self, space: Space) -> None:
        self._space = space
        self._names = [name for name, _ in leaves(space, "actions")]
        boxes = [isinstance(leaf, Box) for _, leaf in leaves(space, "actions")]
        self.noise_kind: Literal["uniform", "normal"] = "normal" if all(boxes) else "uniform"
        self._parts: list[_Part] = [
            Gaussian(leaf, self.noise_kind) if isinstance(leaf, Box) else Categoricals(leaf)
            for _, leaf in leaves(space, "actions")
        ]
        self._maps_actions = any(boxes)
        self.inputs = sum(part.inputs for part in self._parts)
        self.noise = sum(part.noise for part in self._parts)
        self.log_std_at = _log_std_places(self._parts)

    def act(self, inputs: Array, noise: Array | None) -> dict[str, Array]:
        """Return columns `actions`, `logp` float32 (rows,) and `action_dist_inputs`.

        If the space has a Box, also `actions_for_env`.
        """
        columns: dict[str, Array] = {}
        logps = []
        at = noise_at = 0
        for name, part in zip(self._names, self._parts, strict=True):
            numbers = None if noise is None else noise[:, noise_at : noise_at + part.noise]
            actions, logp = part.act(inputs[:, at : at + part.inputs], numbers)
            columns[name] = actions
            logps.append(logp)
            if self._maps_actions:
                columns["actions_for_env" + name.removeprefix("actions")] = part.for_env(actions)
            at += part.inputs
            noise_at += part.noise
        columns["logp"] = (logps[0] if len(logps) == 1 else np.sum(logps, axis=0)).astype(np.float32, copy=False)
        columns["action_dist_inputs"] = inputs
        return columns

    def forbid(self, inputs: torch.Tensor, illegal: torch.Tensor) -> torch.Tensor:
        """Return `inputs` with probability 0 for choices that are `illegal`, bool (rows, all choices)."""
        if not self._maps_actions:
            return inputs.masked_fill(illegal, _ILLEGAL)
        parts, at = [], 0
        for part, x in self._split(inputs):
            if isinstance(part, Categoricals):
                x = x.masked_fill(illegal[:, at : at + part.inputs], _ILLEGAL)
                at += part.inputs
            parts.append(x)
        return torch.cat(parts, -1)

    def mode(self, inputs: torch.Tensor) -> dict[str, Any]:
        """Return `actions` and `actions_for_env` as `act` does without noise, nested, by torch operations alone."""
        modes = [part.mode(x) for part, x in self._split(inputs)]
        return {
            root: nest(self._space, dict(zip(self._names, each, strict=True)), "actions")
            for root, each in zip(("actions", "actions_for_env"), zip(*modes, strict=True), strict=True)
        }

    def policy_actions(self, env_actions: Mapping[str, Array]) -> dict[str, Array]:
        """Return columns "actions/..." for which the env would have got `env_actions`, under the same names."""
        return {name: part.from_env(env_actions[name]) for name, part in zip(self._names, self._parts, strict=True)}

    def logp(self, inputs: torch.Tensor, actions: Any) -> torch.Tensor:
        """Return the log-probability (rows,) of `actions`, nested as the action space is."""
        if len(self._parts) == 1:
            return self._parts[0].logp(inputs, self._flat(actions)[0])
        pairs = zip(self._split(inputs), self._flat(actions), strict=True)
        return torch.stack([part.logp(x, a) for (part, x), a in pairs]).sum(0)

    def entropy(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the entropy (rows,) in nats."""
        if len(self._parts) == 1:
            return self._parts[0].entropy(inputs)
        return torch.stack([part.entropy(x) for part, x in self._split(inputs)]).sum(0)

    def nest(self, columns: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Return the columns of `act`, with `actions` and `actions_for_env` nested as the action space is."""
        nested = {name: value for name, value in columns.items() if not name.startswith("actions")}
        for root in ("actions", "actions_for_env"):
            if any(name == root or name.startswith(f"{root}/") for name in columns):
                nested[root] = nest(self._space, columns, root)  # type: ignore[arg-type]
        return nested

    def _split(self, inputs: torch.Tensor) -> list[tuple[_Part, torch.Tensor]]:
        sizes = [part.inputs for part in self._parts]
        return list(zip(self._parts, torch.split(inputs, sizes, dim=-1), strict=True))

    def _flat(self, actions: Any) -> list[torch.Tensor]:
        return [torch.as_tensor(value) for value in leaf_values(self._space, actions)]


def _log_std_places(parts: list[_Part]) -> list[int]:
    """Return which inputs are log standard deviations. A module may keep these as parameters."""
    places: list[int] = []
    at = 0
    for part in parts:
        if isinstance(part, Gaussian):
            places += range(at + part.inputs // 2, at + part.inputs)
        at += part.inputs
    return places
