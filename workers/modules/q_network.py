"""The policy of DQN: a value for each action, and now and then any action."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import nn

from headrace.schemas.chunks.spaces import Discrete, Spaces
from headrace.schemas.errors import ModuleError
from headrace.workers.envs.action_masks import ActionMask
from headrace.workers.modules.encoders import Encoder
from headrace.workers.modules.layers import linear

_ILLEGAL = -1e9
"""Value of an action that the observation's "action_mask" forbids: finite, so that 0 times it is 0."""


def q_network(spaces: Spaces, *, hidden: Sequence[int] = (128, 128), seed: int = 0) -> QNetwork:
    """Build a `QNetwork`. `seed` alone decides its initial weights.

    Raises `ModuleError` for an action space other than Discrete, and for a layer without units.
    """
    if not isinstance(spaces.action, Discrete):
        raise ModuleError(
            f"a Q-network has a value for each action of a Discrete space, and this space is {spaces.action!r:.200}; "
            'take learner.algorithm = "ppo" or "impala", whose module is actor_critic'
        )
    if any(size < 1 for size in hidden):
        raise ModuleError(f"hidden = {tuple(hidden)} has a layer without units; give positive sizes")
    return QNetwork(spaces, spaces.action, tuple(hidden), seed)


class QNetwork(nn.Module):
    """Encoder and MLP with one output for each action.

    It explores with the `exploration_rate` that comes with its weights, 1 before the first: it takes any legal action
    with that probability, else the best one.
    """

    obeys_action_mask = True
    noise_size = 2
    noise_kind: Literal["uniform", "normal"] = "uniform"

    def __init__(self, spaces: Spaces, action: Discrete, hidden: tuple[int, ...], seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self._start = action.start
        self._mask = ActionMask.of(spaces)
        self.encoder: Encoder = Encoder(spaces.observation, generator)
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise((self.encoder.size, *hidden)):
            layers += [linear(inputs, outputs, 2**0.5, generator), nn.ReLU()]
        self.layers = nn.Sequential(
            *layers, linear(hidden[-1] if hidden else self.encoder.size, action.n, 1.0, generator)
        )
        self.exploration_rate: torch.Tensor
        self.register_buffer("exploration_rate", torch.ones(()))

    def q_values(self, obs: Any) -> torch.Tensor:
        """Return the value of each action (rows, actions), with gradients."""
        values: torch.Tensor = self.layers(self.encoder(obs))
        if self._mask is None:
            return values
        illegal = self._mask.illegal(obs)
        # An observation without a legal action is an episode's last. A cut one is worth what its best action is.
        return values.masked_fill(illegal & ~illegal.all(1, keepdim=True), _ILLEGAL)

    @torch.no_grad()
    def forward_exploration(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the best action, or any legal one with the probability `exploration_rate`."""
        values, noise = self.q_values(batch["obs"]), batch["noise"]
        legal = (values != _ILLEGAL).cumsum(1)
        any_action = (legal <= noise[:, 1:] * legal[:, -1:]).sum(1).clamp(max=values.shape[1] - 1)
        explores = noise[:, 0] < self.exploration_rate
        return {"actions": torch.where(explores, any_action, values.argmax(1)) + self._start}

    @torch.no_grad()
    def forward_inference(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the best action."""
        return self.torch_inference(batch)

    def torch_inference(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the best action, by torch operations alone, for an export."""
        return {"actions": self.q_values(batch["obs"]).argmax(1) + self._start}
