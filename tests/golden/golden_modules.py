"""Policies for the golden chunks. They compute with integers only, so every CPU gives the same bits.

Observations are rounded to eighths and weighed with weights that are eighths too, as integers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from headrace.schemas.chunks.spaces import Box, Dict, Discrete, MultiDiscrete, Spaces, leaf_size, leaves, nest

EIGHTHS = 8
MODULUS = 1024


class Exact(nn.Module):
    """A feed-forward policy. `noise_kind` is that of its numbers; `bare` sends what it chose, in bounds or not.

    `reads_t` gives a column of the fleet's steps.
    """

    def __init__(
        self, spaces: Spaces, *, noise_kind: str = "uniform", bare: bool = False, reads_t: bool = False
    ) -> None:
        super().__init__()
        self._space = spaces.action
        self._observed = [name for name, _ in leaves(spaces.observation, "obs") if not name.endswith("action_mask")]
        self._masks = isinstance(spaces.observation, Dict) and "action_mask" in spaces.observation.spaces
        self._leaves = list(leaves(spaces.action, "actions"))
        self._bare, self._reads_t = bare, reads_t
        inputs = sum(leaf_size(leaf) for name, leaf in leaves(spaces.observation, "obs") if name in self._observed)
        self.noise_kind = noise_kind
        self.noise_size = sum(leaf_size(leaf) for _, leaf in self._leaves)
        table = (np.arange(inputs * self.noise_size) * 7 % 13 - 5).reshape(inputs, self.noise_size)
        self.weights = nn.Parameter(torch.from_numpy(table.astype(np.float32)) / EIGHTHS)
        self.register_buffer("shift", torch.arange(self.noise_size, dtype=torch.int64))

    def forward_exploration(self, batch: dict[str, Any]) -> dict[str, Any]:
        return self._act(batch, batch["noise"])

    def forward_inference(self, batch: dict[str, Any]) -> dict[str, Any]:
        return self._act(batch, None)

    def forward_train(self, batch: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError("golden policies are not trained")

    def _act(self, batch: dict[str, Any], noise: torch.Tensor | None) -> dict[str, Any]:
        columns = flat(batch["obs"])
        return self._answer(columns, self._scores(columns), noise, batch.get("t"))

    def _scores(self, columns: Mapping[str, torch.Tensor]) -> torch.Tensor:
        rows = [columns[name].reshape(len(columns[name]), -1).to(torch.float64) for name in self._observed]
        seen = torch.round(torch.cat(rows, 1) * EIGHTHS).to(torch.int64)
        weights = torch.round(self.weights.detach() * EIGHTHS).to(torch.int64)
        return ((seen[:, :, None] * weights).sum(1) + self.shift) % MODULUS

    def _answer(
        self, columns: Mapping[str, torch.Tensor], scores: torch.Tensor, noise: torch.Tensor | None, t: int | None
    ) -> dict[str, Any]:
        drawn = torch.zeros_like(scores) if noise is None else torch.floor(noise * 64).to(torch.int64)
        mask = columns["obs/action_mask"] if self._masks else None
        chosen, sent, at = {}, {}, 0
        for name, leaf in self._leaves:
            part = (scores + drawn)[:, at : at + leaf_size(leaf)]
            at += leaf_size(leaf)
            chosen[name] = choose(leaf, part, mask)
            sent[name.replace("actions", "actions_for_env", 1)] = bounded(leaf, chosen[name])
        answer = {
            "actions": nest(self._space, chosen, "actions"),
            "logp": -(scores[:, 0] % 16).to(torch.float32) / EIGHTHS,
            "values": scores.sum(1).to(torch.float32) / 16,
            "action_dist_inputs": scores.to(torch.float32) / EIGHTHS,
        }
        if not self._bare and any(isinstance(leaf, Box) for _, leaf in self._leaves):
            answer["actions_for_env"] = nest(self._space, sent, "actions_for_env")
        if self._reads_t:
            answer["t"] = torch.full((len(scores),), -1 if t is None else t, dtype=torch.int64)
        return answer

    def logp(self, dist_inputs: torch.Tensor, actions: Any) -> torch.Tensor:
        """Return the log-probability that learners and logged actions ask for."""
        told = sum(part.reshape(len(part), -1).to(torch.float32).sum(1) for part in flat(actions).values())
        return -(dist_inputs[:, 0] + told) / EIGHTHS

    def policy_actions(self, env_actions: Mapping[str, Any]) -> dict[str, Any]:
        """Return the actions for which the env would have got these."""
        return dict(env_actions)


class ExactNumpy(Exact):
    """The same policy, which acts on arrays."""

    def numpy_act(self) -> Any:
        def act(columns: Mapping[str, Any], noise: Any) -> dict[str, Any]:
            tensors = {name: torch.from_numpy(np.ascontiguousarray(column)) for name, column in columns.items()}
            drawn = None if noise is None else torch.from_numpy(np.ascontiguousarray(noise))
            answer = self._answer(tensors, self._scores(tensors), drawn, None)
            parts = {name: answer.pop(name) for name in ("actions", "actions_for_env") if name in answer}
            return {
                **{key: tensor.numpy() for name, part in parts.items() for key, tensor in flat(part, name).items()},
                **{name: tensor.numpy() for name, tensor in answer.items()},
            }

        return act


class ExactRecurrent(Exact):
    """A policy that remembers two numbers and how often it acted."""

    def initial_state(self) -> dict[str, torch.Tensor]:
        return {"h": torch.tensor([0.125, 0.25]), "age": torch.tensor(0, dtype=torch.int64)}

    def _act(self, batch: dict[str, Any], noise: torch.Tensor | None) -> dict[str, Any]:
        columns, state = flat(batch["obs"]), batch["state_in"]
        remembered = torch.round(state["h"] * EIGHTHS).to(torch.int64)
        scores = (self._scores(columns) + remembered.sum(1, keepdim=True) + state["age"][:, None]) % MODULUS
        h = ((3 * remembered + scores[:, :1] + torch.arange(2)) % 64).to(torch.float32) / EIGHTHS
        out = {"h": h, "age": state["age"] + 1}
        return {**self._answer(columns, scores, noise, batch.get("t")), "state_out": out}


def choose(leaf: Any, scores: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return an action (rows, *shape) of `leaf`; Box actions lie in [-2, 2), in bounds or not."""
    if isinstance(leaf, Discrete):
        score = scores[:, 0]
        if mask is None:
            return score % leaf.n + leaf.start
        legal = mask.to(torch.int64)
        nth = score % legal.sum(1).clamp(min=1) + 1  # a row of an agent that does not act may have an empty mask
        return (legal.cumsum(1) < nth[:, None]).sum(1).clamp(max=leaf.n - 1) + leaf.start
    if isinstance(leaf, MultiDiscrete):
        table = torch.tensor([leaf.flat_nvec, leaf.flat_start], dtype=torch.int64)
        return (scores % table[0] + table[1]).reshape(-1, *leaf.shape)
    if isinstance(leaf, Box):
        return ((scores % 64 - 32).to(torch.float32) / 16).reshape(-1, *leaf.shape)
    return (scores % 2).reshape(-1, *leaf.shape)


def bounded(leaf: Any, action: torch.Tensor) -> torch.Tensor:
    """Return the action, clipped to [-0.5, 0.5] if it is a Box's: the golden envs allow that much."""
    return action.clamp(-0.5, 0.5) if isinstance(leaf, Box) else action


def flat(tree: Any, name: str = "obs") -> dict[str, torch.Tensor]:
    """Return the leaves of nested tensors by name."""
    if isinstance(tree, Mapping):
        parts = [flat(part, f"{name}/{key}") for key, part in tree.items()]
    elif isinstance(tree, tuple):
        parts = [flat(part, f"{name}/{index}") for index, part in enumerate(tree)]
    else:
        return {name: tree}
    return {key: leaf for part in parts for key, leaf in part.items()}
