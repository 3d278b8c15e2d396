"""Connectors for tests, sound ones and others, and a policy that answers what it saw."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from headrace.schemas.chunks.spaces import Box, Discrete, Spaces
from headrace.workers.connectors import (
    Connector,
    Rows,
)


class FailingConnector(Connector):
    """Raises at the `fails_at`th rows, or when it is asked to make room."""

    fails_at = 0
    widens = True

    def __init__(self) -> None:
        self.calls = 0

    def connect(self, spaces: Spaces, width: int) -> Spaces:
        return spaces

    def process(self, rows: Rows) -> Any:
        self.calls += 1
        if self.calls == self.fails_at:
            raise ZeroDivisionError("no mass")
        return dict(rows.columns)

    def widen(self, width: int) -> None:
        if not self.widens:
            type(self).widens = True
            raise MemoryError("no room")


class Echo(torch.nn.Module):
    """Acts by chance and answers what it saw as a column."""

    noise_size, noise_kind = 1, "uniform"

    def __init__(self, spaces: Spaces) -> None:
        super().__init__()
        assert isinstance(spaces.action, Discrete)
        self.n = spaces.action.n

    def forward_exploration(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"actions": (batch["noise"][:, 0] * self.n).long(), "saw": batch["obs"].clone()}

    forward_inference = forward_train = forward_exploration


class Halves(Connector):
    """Observations are half of the env's, as float64."""

    def connect(self, spaces: Spaces, width: int) -> Spaces:
        assert isinstance(spaces.observation, Box)
        return Spaces(observation=Box(shape=spaces.observation.shape, dtype="<f8"), action=spaces.action)

    def process(self, rows: Rows) -> Any:
        return {"obs": rows.columns["obs"].astype(np.float64) / 2}


class NextAction(Connector):
    """The env gets the action after the policy's, of 100."""

    def connect(self, spaces: Spaces, width: int) -> Spaces:
        return spaces

    def process(self, rows: Rows) -> Any:
        return {"actions": (rows.columns["actions"] + 1) % 100}
