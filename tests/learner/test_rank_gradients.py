"""The update of a learner by several ranks, as in `ddp_ppo.py`, is that of one process with all their batches."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from learner.conftest import MakeBatch
from torch.nn.parallel import DistributedDataParallel

from headrace import actor_critic
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.chunks.spaces import Spaces

EXAMPLE = Path(__file__).parents[2] / "docs/examples/ddp_ppo.py"
ROUND: list[Any] = [
    ((5, 3), (ChunkEnd.TERMINATED, ChunkEnd.ONGOING)),
    ((9,), (ChunkEnd.TRUNCATED,)),
    ((2, 4, 1), (ChunkEnd.ONGOING, ChunkEnd.TERMINATED, ChunkEnd.ONGOING)),
    ((0,), (ChunkEnd.ABORTED,)),
]
"""Lengths and ends of a round's batches. Ranks get different numbers of steps, and one of them may get none."""


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ddp_ppo", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def save_gradients(rank: int, shares: list[list[ChunkBatch]], folder: str) -> None:
    """Save the gradients of an update of the round, and its number of steps, as this rank has them."""
    torch.set_num_threads(1)
    program = example()
    store = dist.FileStore(f"{folder}/store-{len(shares)}", len(shares))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(shares))
    first = shares[0][0]
    policy = actor_critic(Spaces(observation=first.observation_space, action=first.action_space))
    loss = DistributedDataParallel(program.Loss(policy))
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    program.EPOCHS, program.MINIBATCHES, program.MAX_NORM = 1, 1, float("inf")
    steps = program.train(loss, optimizer, shares[rank])
    found = {name: weight.grad for name, weight in policy.named_parameters() if len(weight)}
    torch.save((steps, found), f"{folder}/{len(shares)}-{rank}.pt")
    dist.destroy_process_group()
    os._exit(0)  # a thread of gloo may still run, and would abort the end of Python


@pytest.mark.parametrize("shares", [[[0, 2], [1, 3]], [[0, 1, 2], [3]]], ids=["both", "one_without_steps"])
def test_the_gradient_of_two_ranks_is_that_of_one_process_with_their_batches(
    tmp_path: Path, make_batch: MakeBatch, shares: list[list[int]]
) -> None:
    batches = [make_batch(*ROUND[number], seed=number) for number in range(len(ROUND))]
    for number, batch in enumerate(batches):  # each chunk is of an episode of its own
        batch.table["id_low"] = 10 * number + np.arange(len(batch))
    found = []
    for ranks in ([batches], [[batches[number] for number in share] for share in shares]):
        processes.spawn(save_gradients, (ranks, str(tmp_path)), nprocs=len(ranks))
        found += [torch.load(tmp_path / f"{len(ranks)}-{rank}.pt", weights_only=True) for rank in range(len(ranks))]
    (steps, alone), *others = found
    assert steps == 24
    assert all(gradient.abs().max() > 1e-4 for gradient in alone.values())
    for others_steps, gradients in others:
        assert others_steps == steps
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, alone[name], rtol=0.0, atol=1e-6)
