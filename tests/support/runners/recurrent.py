"""Policies with memory, and how their batches travel."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from headrace.schemas.accounts.ledger import WorkerTotals
from headrace.schemas.chunks.batch import BatchHeader, ChunkBatch, encode_batch
from headrace.workers.connectors import FlattenObservations, FrameStack, MeanStd, PreviousActionReward
from support.decode_batch import decode_batch

LSTM = "headrace.workers.modules:lstm_actor_critic"


class Ages(torch.nn.Module):
    """Remembers how many steps its episode has seen, beginning at 100, and answers it as a column."""

    noise_size, noise_kind = 1, "uniform"

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def initial_state(self) -> dict[str, torch.Tensor]:
        return {"age": torch.tensor(100), "pair": torch.zeros(2)}

    def forward_exploration(self, batch: dict[str, Any]) -> dict[str, Any]:
        age, pair = batch["state_in"]["age"], batch["state_in"]["pair"]
        return {"actions": torch.ones_like(age), "age": age, "state_out": {"age": age + 1, "pair": pair + 0.5}}

    forward_inference = forward_train = forward_exploration


class WithoutState(Ages):
    def initial_state(self) -> Any:
        return ["h"]


def over_the_wire(batch: ChunkBatch) -> ChunkBatch:
    header = BatchHeader(
        fleet_id="f", slot=0, incarnation=0, seq=1, steps=batch.steps, chunks=len(batch), reasons=list(batch.reasons),
        agents=list(batch.agents), modules=list(batch.modules), totals=WorkerTotals(),
    )  # fmt: skip
    return decode_batch(encode_batch(batch, header), batch.observation_space, batch.action_space)[1]


REMEMBERING: dict[str, Any] = {
    "env_to_module": [PreviousActionReward, FlattenObservations, MeanStd, partial(FrameStack, 2)],
    "module": LSTM,
}
