"""A runner whose module acts in two parts, or by its plain twin: the bytes of all that it samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from headrace.schemas.chunks.batch import ChunkBatch
from support.envs.toy import Walk, runner

Edit = Callable[[Any, int], None]
"""Called with the runner and the number of the poll that has ended."""


def sampled(edit: Edit | None, *, plain: bool, **config: Any) -> list[bytes]:
    """Return all bytes of four fragments, the third of random actions."""
    told: list[bytes] = []
    polls = iter(range(10**6))
    with runner(**{"env": Walk, "rollout_fragment_length": 19, **config}) as sampler:
        (module_id,) = sampler._existing_sampler.steps.policies
        if plain and hasattr(sampler.module, "numpy_act"):
            act_plainly(sampler.module)
            sampler._existing_sampler.use({module_id: sampler.module}, lambda: 0)
        for fragment in range(4):
            on_poll = None if edit is None else lambda: edit(sampler, next(polls))  # type: ignore[misc]
            told += bytes_of(sampler.sample_fragment(on_poll, fragment == 2, on_wait=lambda: None))
    return told


def act_plainly(module: Any) -> None:
    """Let a module act by the plain twin."""
    whole = module.numpy_act()
    module.numpy_act = lambda: lambda columns, noise: whole(columns, noise)


def bytes_of(batch: ChunkBatch) -> list[bytes]:
    """Return all bytes of a batch, with names, dtypes and shapes of its columns."""
    columns = [f"{name} {column.dtype} {column.shape}".encode() for name, column in batch.arrays.items()]
    return [*columns, *(column.tobytes() for column in batch.arrays.values()), batch.table.tobytes()]


def swap_in_the_midst(sampler: Any, poll: int) -> None:
    """Change all weights after two of the polls."""
    if poll in (5, 23):
        with torch.no_grad():
            for parameter in sampler.module.parameters():
                parameter.mul_(-1.25)
