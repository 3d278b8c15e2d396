"""A batch in the two forms that most learners want: single transitions, and padded arrays with time first.

Both are copies: their arrays belong to the caller and may be written to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.chunks.chunk import arrays_in_words, map_arrays
from headrace.schemas.chunks.episodes import episodes_of

if TYPE_CHECKING:
    from headrace.schemas.chunks.batch import ChunkBatch


@dataclass(frozen=True, slots=True, eq=False)
class Transitions:
    """The N steps of a batch, each with the observation after it; chunk after chunk, in time order within each.

    - obs, next_obs, actions: (N, ...), in the nesting of their spaces.
    - rewards: float64 (N,).
    - terminated, truncated: bool (N,), at the last step of an episode that ended so. The next observation is then the
      env's true last one. Where a chunk is cut, or its episode was aborted, both are False: the episode would have gone
      on, and its value is that of the next observation.
    - last: bool (N,), the last step of a chunk. The row after it belongs to another chunk.
    - chunk: int64 (N,), the row of `batch.table` of each step.
    - columns: all further columns (N, ...), such as `logp`, `values`, `weights_seq`.

    End markers have no steps and leave no trace here.
    """

    obs: Any
    actions: Any
    rewards: NDArray[np.float64]
    next_obs: Any
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    last: NDArray[np.bool_]
    chunk: NDArray[np.int64]
    columns: dict[str, NDArray[Any]]

    def __len__(self) -> int:
        return len(self.rewards)

    def __repr__(self) -> str:
        return arrays_in_words(self)


@dataclass(frozen=True, slots=True, eq=False)
class TimeMajor:
    """The B chunks of a batch that have steps, side by side: T is the longest one's length, shorter ones end in zeros.

    - obs: (T + 1, B, ...), in the nesting of the space. The observation after chunk b's last step is `obs[lengths[b],
      b]`; its value stands for all later rewards unless the episode terminated.
    - actions: (T, B, ...). rewards: float64 (T, B).
    - mask: bool (T, B), True at steps.
    - lengths: int64 (B,). terminated, truncated: bool (B,), whether the episode ended so with the chunk.
    - chunk: int64 (B,), each chunk's row of `batch.table`.
    - state_in: (B, ...) by name, a recurrent module's memory before the first step.
    - columns: all further columns (T, B, ...).
    """

    obs: Any
    actions: Any
    rewards: NDArray[np.float64]
    mask: NDArray[np.bool_]
    lengths: NDArray[np.int64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    chunk: NDArray[np.int64]
    state_in: dict[str, NDArray[Any]]
    columns: dict[str, NDArray[Any]]

    def __repr__(self) -> str:
        return arrays_in_words(self)


def transitions(batch: ChunkBatch) -> Transitions:
    """Return the steps of `batch` as transitions."""
    steps, (chunk, lengths) = episodes_of((batch,)), _chunks_of(batch)
    last = np.zeros(len(steps), np.bool_)
    last[steps.offsets[1:] - 1] = True
    return Transitions(
        obs=map_arrays(lambda array: array[steps.step_rows], steps.obs),
        actions=map_arrays(np.copy, steps.actions),
        rewards=steps.rewards.copy(),
        next_obs=map_arrays(lambda array: array[steps.step_rows + 1], steps.obs),
        terminated=last & np.repeat(steps.terminated, lengths),
        truncated=last & np.repeat(steps.truncated, lengths),
        last=last,
        chunk=np.repeat(chunk, lengths),
        columns={name: column.copy() for name, column in steps.columns.items()},
    )


def time_major(batch: ChunkBatch) -> TimeMajor:
    """Return the chunks of `batch` side by side, padded to the longest."""
    steps, (chunk, lengths) = episodes_of((batch,)), _chunks_of(batch)
    longest, lanes = int(lengths.max(initial=0)), np.arange(len(chunk))

    def spread(array: NDArray[Any], more: int = 0) -> NDArray[Any]:
        """Spread the rows of chunks, which have `more` than their length."""
        rows = lengths + more
        lane = np.repeat(lanes, rows)
        padded = np.zeros((longest + more, len(chunk), *array.shape[1:]), array.dtype)
        padded[np.arange(len(lane)) - np.repeat(np.cumsum(rows) - rows, rows), lane] = array
        return padded

    return TimeMajor(
        obs=map_arrays(lambda array: spread(array, 1), steps.obs),
        actions=map_arrays(spread, steps.actions),
        rewards=spread(steps.rewards),
        mask=np.arange(longest)[:, None] < lengths,
        lengths=lengths,
        terminated=steps.terminated,
        truncated=steps.truncated,
        chunk=chunk,
        state_in={name: column.copy() for name, column in steps.state_in.items()},
        columns={name: spread(column) for name, column in steps.columns.items()},
    )


def _chunks_of(batch: ChunkBatch) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows of `batch.table` of the chunks that have steps, and their lengths."""
    chunk = np.flatnonzero(batch.table["length"])
    return chunk, batch.table["length"][chunk].astype(np.int64)
