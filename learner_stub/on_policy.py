"""Filter for on-policy steps: those that an external env logged itself are not samples of the policy.

The policy's log-prob of a logged action gives no valid importance ratio, since the probability with which the env chose
it is unknown. So a chunk is split around logged steps. Each run of the policy's own steps is bootstrapped from the
observation at which the env took over, just as a cut episode is from its last one.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.chunks.batch import OFF_POLICY, STATE_IN, ChunkBatch, is_obs_column
from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.chunks.lookback import LOOKBACK


def on_policy(batch: ChunkBatch) -> ChunkBatch:
    """Return `batch`, which has no end markers, without logged steps: one chunk for each run of the others.

    The result has no lookback and infos. For a recurrent module, runs in the middle of a chunk are left out, since the
    state before them is not known. Returns and lengths of episodes stay those at the end of the chunk that was split.
    """
    logged = batch.columns.get(OFF_POLICY)
    if logged is None or not logged.any():
        return batch
    starts, stops, chunks = _runs(np.asarray(~logged), batch.offsets)
    if any(name.startswith(STATE_IN) for name in batch.columns):
        known = starts == batch.offsets[chunks]
        starts, stops, chunks = starts[known], stops[known], chunks[known]
    steps = _ranges(starts, stops - starts)
    obs = _ranges(starts - batch.offsets[chunks] + batch.obs_offsets[chunks], stops - starts + 1)
    columns = {}
    for name, column in batch.columns.items():
        if name.startswith(LOOKBACK):
            continue
        rows = batch.state_offsets[chunks] if name.startswith(STATE_IN) else obs if is_obs_column(name) else steps
        columns[name] = column[rows]
    table = batch.table[chunks]
    table["t_start"] += starts - batch.offsets[chunks]
    table["length"], table["lookback"] = stops - starts, 0
    table["end"] = np.where(stops == batch.offsets[chunks + 1], table["end"], ChunkEnd.ONGOING)
    return replace(batch, table=table, columns=columns, infos={}, order=None)


def _runs(
    keep: NDArray[np.bool_], offsets: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return (first row, row after the last, chunk) of each run of rows to `keep` within a chunk."""
    before, after = np.roll(keep, 1), np.roll(keep, -1)
    before[offsets[:-1]] = after[offsets[1:] - 1] = False
    starts = np.flatnonzero(keep & ~before)
    return starts, np.flatnonzero(keep & ~after) + 1, np.searchsorted(offsets, starts, side="right") - 1


def _ranges(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return [s, s + 1, ... s + n - 1] for each (s, n), one after another."""
    return np.repeat(starts - np.cumsum(lengths) + lengths, lengths) + np.arange(int(lengths.sum()))
