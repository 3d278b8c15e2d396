"""The policy that all scripts here sample with: 64 x 64 tanh, a shared trunk, sample, log-prob and value each step."""

from __future__ import annotations

import torch
from torch import Tensor, nn

ENV = "CartPole-v1"


class SmallPolicy:
    """(observations (rows, 4)) -> (actions, logp, values), (rows,) each."""

    def __init__(self) -> None:
        self._trunk = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self._head = nn.Linear(64, 3)

    @torch.inference_mode()
    def __call__(self, obs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        outputs = self._head(self._trunk(obs))
        logs = torch.log_softmax(outputs[:, :2], -1)
        actions = torch.multinomial(logs.exp(), 1)
        return actions[:, 0], logs.gather(1, actions)[:, 0], outputs[:, 2]
