"""A policy to be named by its import path, whose columns tell its one weight and the fleet's steps it was told of."""

from __future__ import annotations

from typing import Any, Literal

import torch


class Timed(torch.nn.Module):
    """Always acts 0."""

    noise_size = 1
    noise_kind: Literal["uniform", "normal"] = "uniform"

    def __init__(self, spaces: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward_exploration(self, batch: dict[str, Any]) -> dict[str, Any]:
        rows = len(batch["obs"])
        return {
            "actions": torch.zeros(rows, dtype=torch.int64),
            "values": self.weight.expand(rows),
            "t": torch.full((rows,), batch["t"]),
        }

    def forward_inference(self, batch: dict[str, Any]) -> dict[str, Any]:
        return self.forward_exploration({**batch, "t": 0})

    def forward_train(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"values": self.weight.expand(len(batch["obs"]))}
