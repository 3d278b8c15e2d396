"""Batches as TensorDicts, which TorchRL's replay buffers and losses take. Needs the extra `torchrl`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from headrace.learner_stub.rollouts.tensors import to_torch
from headrace.schemas.chunks.batch import ChunkBatch

_SPREAD = np.uint64(0x9E3779B97F4A7C15)
"""2**64 divided by the golden ratio: multiples of it lie far apart."""


def to_tensordict(batch: ChunkBatch, *, set_truncated: bool = False) -> TensorDict:
    """Return the N steps of `batch` as a TensorDict of batch size (N,), in the layout of TorchRL's collectors.

        buffer.extend(to_tensordict(batch))

    - "observation", ("next", "observation"): (N, ...). Dict and Tuple spaces become nested ones, Tuples by "0", "1".
    - "action": (N, ...); of a Discrete space its number, as with TorchRL's `categorical_action_encoding=True`.
    - ("next", "reward"): float32 (N, 1).
    - ("next", "terminated"), ("next", "truncated"), ("next", "done"): bool (N, 1), at the last step of an episode that
      ended so. At an episode's end, the next observation is the true last one.
    - ("collector", "traj_ids"): int64 (N,), equal in the steps of one chunk, which stand together.
    - further columns, such as "logp" and "values", by their own names: (N, ...).
    - set_truncated: as of TorchRL's collectors. The last step of every chunk counts as truncated, so that an estimator
      of advantages does not go on into the next chunk.

    The tensors own their memory: it is the one copy that puts each next observation beside its step. A batch of end
    markers gives N = 0.
    """
    steps = to_torch(batch.transitions())
    truncated = steps.truncated | (steps.last & ~steps.terminated) if set_truncated else steps.truncated
    done = {"terminated": steps.terminated, "truncated": truncated, "done": steps.terminated | truncated}
    following = {name: flag[:, None] for name, flag in done.items()}
    data = {
        **_nested(steps.columns),
        "observation": _nested(steps.obs),
        "action": _nested(steps.actions),
        "collector": {"traj_ids": _trajectories(batch, steps.chunk)},
        "next": {"observation": _nested(steps.next_obs), "reward": steps.rewards.float()[:, None], **following},
    }
    return TensorDict(data, batch_size=[len(steps)])


def _nested(value: Any) -> Any:
    """Return `value` with dicts in place of tuples."""
    if isinstance(value, tuple):
        value = {str(i): part for i, part in enumerate(value)}
    return {name: _nested(part) for name, part in value.items()} if isinstance(value, dict) else value


def _trajectories(batch: ChunkBatch, chunk: torch.Tensor) -> torch.Tensor:
    """Return a number for the chunk of each step. Two chunks share one by a chance of 2**-64.

    Slices of a replay buffer end where it changes: after each chunk, as another agent or another rank has the next.
    """
    row = np.arange(len(batch), dtype=np.uint64) + (batch.table["chunk_index"].astype(np.uint64) << np.uint64(32))
    chunks = (batch.table["id_high"] ^ batch.table["id_low"]) + row * _SPREAD
    return torch.from_numpy(chunks.view(np.int64))[chunk]
