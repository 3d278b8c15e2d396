"""A policy with many large tensors, whose columns tell the least and the greatest number in any of them."""

from __future__ import annotations

from typing import Any, Literal

import torch

TENSORS = 16
_STRIDE = 65_536
"""Elements from one that is looked at to the next."""


class Telling(torch.nn.Module):
    """Always acts 0."""

    noise_size = 1
    noise_kind: Literal["uniform", "normal"] = "uniform"

    def __init__(self, spaces: Any, nbytes: int) -> None:
        super().__init__()
        for number in range(TENSORS):
            self.register_buffer(f"w{number}", torch.zeros(nbytes // TENSORS // 4))

    def forward_exploration(self, batch: dict[str, Any]) -> dict[str, Any]:
        rows = len(batch["obs"])
        seen = torch.stack([torch.cat((tensor[::_STRIDE], tensor[-1:])) for tensor in self.buffers()])
        columns = {"low": seen.min().expand(rows), "high": seen.max().expand(rows)}
        return {"actions": torch.zeros(rows, dtype=torch.int64), **columns}

    forward_inference = forward_exploration
