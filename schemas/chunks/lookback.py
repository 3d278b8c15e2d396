"""Lookback: the steps just before a chunk, for code that must see further back than the chunk's first observation.

They never mix with the chunk's own rows: they travel in columns of their own. Such a column is named "lookback/" and
the name of the step or observation column that it continues backwards. Chunk i owns the next `table["lookback"][i]`
rows of each, oldest first. Row k of "lookback/obs" is the observation before the action in row k of "lookback/actions".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.chunks.chunk_arrays import named_arrays
from headrace.schemas.errors import ChunkError

if TYPE_CHECKING:
    from headrace.schemas.chunks.chunk import EpisodeChunk

LOOKBACK = "lookback/"
"""Prefix of lookback columns."""


@dataclass(frozen=True, slots=True, eq=False)
class Lookback:
    """n steps of the same agent and episode, oldest first; the chunk's first observation follows the last.

    Everything is as in `EpisodeChunk`, except that `obs` has n rows too: the observation before each action.
    """

    obs: Any
    actions: Any
    rewards: NDArray[np.float64]
    weights_seq: NDArray[np.int64]
    env_t: NDArray[np.int64]
    columns: dict[str, NDArray[Any]]

    def __len__(self) -> int:
        return len(self.rewards)


def check_lookbacks(parts: Sequence[EpisodeChunk], joined: EpisodeChunk) -> None:
    """Raise `ChunkError` unless the lookback of each of `parts` repeats the rows that precede the part in `joined`.

    Rows older than the first row of `joined` cannot be compared, and pass. So do columns that `joined` leaves out.
    """
    row = 0
    left_out = {name for part in parts for name in part.columns} - joined.columns.keys()
    for part in parts:
        if part.lookback is not None:
            known = min(len(part.lookback), row)
            rows = slice(len(part.lookback) - known, len(part.lookback))
            told = _arrays(part.lookback, rows)
            told = {name: array for name, array in told.items() if name not in left_out}
            _check_rows(part, told, _arrays(joined, slice(row - known, row)))
        row += len(part)


def _arrays(steps: EpisodeChunk | Lookback, rows: slice) -> dict[str, NDArray[Any]]:
    tree = {
        "obs": steps.obs,
        "actions": steps.actions,
        "rewards": steps.rewards,
        "weights_seq": steps.weights_seq,
        "env_t": steps.env_t,
        **steps.columns,
    }
    return {name: array[rows] for key, part in tree.items() for name, array in named_arrays(part, key)}


def _check_rows(chunk: EpisodeChunk, told: dict[str, NDArray[Any]], known: dict[str, NDArray[Any]]) -> None:
    for name in sorted(told.keys() | known.keys()):
        ours, theirs = known.get(name), told.get(name)
        if ours is None or theirs is None:
            raise ChunkError(f"{name!r} of {chunk!r} is only in {'the steps before' if theirs is None else 'lookback'}")
        if not np.array_equal(ours, theirs, equal_nan=ours.dtype.kind == "f"):
            raise ChunkError(
                f"lookback of {chunk!r} does not repeat the steps before it: {name!r} is {theirs!r:.80} where "
                f"{ours!r:.80} was"
            )
