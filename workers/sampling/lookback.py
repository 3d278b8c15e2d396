"""The last steps of each open episode, kept from one cut to the next, so that chunks can look back on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.chunks.batch import is_obs_column
from headrace.schemas.chunks.chunk import LOOKBACK, ChunkEnd
from headrace.workers.sampling.fragment import OpenChunk

Columns = Mapping[str, NDArray[Any]]


def look_back(
    columns: Columns, chunks: Sequence[OpenChunk], lengths: NDArray[np.int64], horizon: int
) -> tuple[list[int], dict[str, NDArray[Any]]]:
    """Return how many steps each chunk looks back, and the lookback columns for all of them.

    `columns` are the step and observation columns of exactly these chunks, one after another. Episodes that continue
    keep copies of their last `horizon` steps for the next cut. A chunk has no lookback if its columns differ from those
    of the steps before. For example, random actions have no "logp".
    """
    kept: list[Columns] = []
    start = 0
    for i, (chunk, length) in enumerate(zip(chunks, lengths.tolist(), strict=True)):
        episode, before = chunk.episode, chunk.episode.last_steps
        own = {name: _steps(name, column, start, length, i) for name, column in columns.items()}
        kept.append(before if _alike(before, own) else {})
        episode.last_steps = _last(kept[-1], own, horizon) if chunk.end is ChunkEnd.ONGOING else {}
        start += length
    counts = [len(rows["rewards"]) if rows else 0 for rows in kept]
    return counts, {
        LOOKBACK + name: np.concatenate([column[:0], *(rows[name] for rows in kept if rows)])
        for name, column in columns.items()
    }


def _steps(name: str, column: NDArray[Any], start: int, length: int, chunks_before: int) -> NDArray[Any]:
    """Return a chunk's rows of a column, without the observation after its last step."""
    first = start + chunks_before if is_obs_column(name) else start
    return column[first : first + length]


def _alike(before: Columns, own: Columns) -> bool:
    return before.keys() == own.keys() and all(
        (rows.dtype, rows.shape[1:]) == (own[name].dtype, own[name].shape[1:]) for name, rows in before.items()
    )


def _last(before: Columns, own: Columns, horizon: int) -> Columns:
    """Return copies of the last `horizon` steps. Views would keep a whole fragment in memory."""
    return {
        name: np.concatenate([before[name], rows[-horizon:]])[-horizon:] if before else rows[-horizon:].copy()
        for name, rows in own.items()
    }
