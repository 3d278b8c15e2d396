"""The steps of one update: chunks of many batches joined into tensors, with the rows that a learner needs of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headrace.learner_stub.rollouts.tensors import to_torch
from headrace.schemas.chunks.batch import OFF_POLICY, STATE_IN, ChunkBatch, is_obs_column
from headrace.schemas.chunks.chunk import LOOKBACK, RANDOM_ACTIONS, ChunkEnd
from headrace.schemas.chunks.episodes import Episodes, episodes_of, ranges
from headrace.schemas.errors import ModuleError


@dataclass(frozen=True, slots=True)
class Rollout:
    """N steps in C chunks, one after another. The tensors of received batches are copies.

    - episodes: all of it as arrays, for `gae`.
    - obs: tensors (N + C, ...) in the nesting of the space: each chunk's T steps and the observation after them.
    - actions: tensors (N, ...), in the nesting of the space.
    - logp: float32 (N,), of the behaviour policy.
    - state_in: tensors (C, ...) by name, a recurrent module's memory before each chunk; empty for other modules.
    """

    episodes: Episodes
    obs: Any
    actions: Any
    logp: Tensor
    state_in: dict[str, Tensor]

    def __len__(self) -> int:
        return len(self.episodes)

    @property
    def obs_offsets(self) -> NDArray[np.int64]:
        """Return where each chunk's rows of `obs` begin: int64 (C + 1,)."""
        return self.episodes.offsets + np.arange(len(self.episodes.offsets))


def join(batches: Sequence[ChunkBatch]) -> Rollout | None:
    """Join the steps of `batches` that a policy chose; None when there are none.

    End markers have no steps. Random and logged actions have no policy for an importance ratio. So all these are left
    out. Raises `ModuleError` when steps have no `logp`, or batches not the same columns.
    """
    own = [batch for batch in map(chosen, batches) if len(batch)]
    if not own:
        return None
    for batch in own:
        if "logp" not in batch.columns:
            raise ModuleError(
                f"a batch of slot {batch.slot} has no column 'logp', which PPO needs; return it from "
                "forward_exploration, and sample with explore = true"
            )
    _check_alike(own)
    episodes = episodes_of([replace(batch, arrays={n: batch.arrays[n] for n in _needed(batch)}) for batch in own])
    return Rollout(
        episodes=episodes,
        obs=to_torch(episodes.obs),
        actions=to_torch(episodes.actions),
        logp=to_torch(episodes.columns["logp"]).float(),
        state_in=to_torch(episodes.state_in),
    )


def _check_alike(batches: Sequence[ChunkBatch]) -> None:
    first, *others = batches
    for batch in others:
        if differ := sorted(set(_needed(first)) ^ set(_needed(batch))):
            raise ModuleError(
                f"of the batches of slots {first.slot} and {batch.slot} only one has the columns {differ[:5]}; their "
                "workers must run the same env, connectors and module"
            )


def chosen(batch: ChunkBatch) -> ChunkBatch:
    """Return `batch` without end markers, random actions and logged ones.

    Raises `ModuleError` for steps of action chunks, which were chosen from earlier observations than their own.
    """
    if "action_chunk_step" in batch.columns:
        raise ModuleError(
            f"a batch of slot {batch.slot} is of a module with action_chunk_size: its actions were chosen from earlier "
            "observations than those of their steps, from which log-probs would be computed here; leave "
            "action_chunk_size out, or write a loss that reads the column 'action_chunk_step'"
        )
    keep = (batch.table["length"] > 0) & (batch.table["flags"] & RANDOM_ACTIONS == 0)
    return on_policy(batch if keep.all() else batch.select(keep))


def _needed(batch: ChunkBatch) -> list[str]:
    needed = ("rewards", "logp", "obs", "actions", STATE_IN[:-1])
    return [name for name in batch.arrays if name.split("/")[0] in needed]


def on_policy(batch: ChunkBatch) -> ChunkBatch:
    """Return `batch`, which has no end markers, without logged steps: one chunk for each run of the others.

    The policy's log-prob of a logged action gives no valid importance ratio, since the probability with which the env
    chose it is unknown. A run is bootstrapped from the observation at which the env took over, just as a cut episode is
    from its last one.

    The result has no lookback and infos. For a recurrent module, runs in the middle of a chunk are left out, since the
    state before them is not known. Returns of episodes stay those at the end of the chunk that was split.
    """
    logged = batch.arrays.get(OFF_POLICY)
    if logged is None or not logged.any():
        return batch
    starts, stops, chunks = _runs(np.asarray(~logged), batch.offsets)
    if batch.state_in:
        known = starts == batch.offsets[chunks]
        starts, stops, chunks = starts[known], stops[known], chunks[known]
    steps = ranges(starts, stops - starts)
    obs = ranges(starts - batch.offsets[chunks] + batch.obs_offsets[chunks], stops - starts + 1)
    arrays = {}
    for name, array in batch.arrays.items():
        if name.startswith(LOOKBACK):
            continue
        rows = batch.state_offsets[chunks] if name.startswith(STATE_IN) else obs if is_obs_column(name) else steps
        arrays[name] = array[rows]
    table = batch.table[chunks]
    env_t = batch.arrays.get("env_t")  # of several agents, which may pause
    table["t_start"] = table["t_start"] + starts - batch.offsets[chunks] if env_t is None else env_t[starts]
    table["episode_length"] -= batch.offsets[chunks + 1] - stops
    table["length"], table["lookback"] = stops - starts, 0
    table["end"] = np.where(stops == batch.offsets[chunks + 1], table["end"], ChunkEnd.ONGOING)
    task_of = None if batch.task_of is None else batch.task_of[chunks]
    return replace(batch, table=table, arrays=arrays, infos={}, task_of=task_of)


def _runs(
    keep: NDArray[np.bool_], offsets: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return (first row, row after the last, chunk) of each run of rows to `keep` within a chunk."""
    before, after = np.roll(keep, 1), np.roll(keep, -1)
    before[offsets[:-1]] = after[offsets[1:] - 1] = False
    starts = np.flatnonzero(keep & ~before)
    return starts, np.flatnonzero(keep & ~after) + 1, np.searchsorted(offsets, starts, side="right") - 1
