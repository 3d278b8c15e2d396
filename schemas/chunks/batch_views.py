"""A batch in the two forms that most learners want: single transitions, and padded arrays with time first.

Both are copies: their arrays belong to the caller and may be written to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.chunks.lookback import LOOKBACK
from headrace.schemas.chunks.spaces import nest

if TYPE_CHECKING:
    from headrace.schemas.chunks.batch import ChunkBatch

_FIXED = ("rewards",)
_STATE_IN = "state_in/"


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


def transitions(batch: ChunkBatch) -> Transitions:
    """Return the steps of `batch` as transitions."""
    lengths = batch.table["length"].astype(np.int64)
    chunk = np.repeat(np.arange(len(lengths)), lengths)
    rows = np.arange(len(chunk)) + (batch.obs_offsets[:-1] - batch.offsets[:-1])[chunk]
    last = np.zeros(len(chunk), np.bool_)
    last[batch.offsets[1:][lengths > 0] - 1] = True
    end = batch.table["end"][chunk]
    steps, observations = _columns_of(batch)
    steps = {name: column.copy() for name, column in steps.items()}
    return Transitions(
        obs=nest(batch.observation_space, {n: column[rows] for n, column in observations.items()}, "obs"),
        actions=nest(batch.action_space, steps, "actions"),
        rewards=steps["rewards"],
        next_obs=nest(batch.observation_space, {n: column[rows + 1] for n, column in observations.items()}, "obs"),
        terminated=last & (end == ChunkEnd.TERMINATED),
        truncated=last & (end == ChunkEnd.TRUNCATED),
        last=last,
        chunk=chunk,
        columns=_further(steps),
    )


def time_major(batch: ChunkBatch) -> TimeMajor:
    """Return the chunks of `batch` side by side, padded to the longest."""
    chunk = np.flatnonzero(batch.table["length"])
    lengths = batch.table["length"][chunk].astype(np.int64)
    longest = int(lengths.max(initial=0))
    lane = np.repeat(np.arange(len(chunk)), lengths)
    t = np.arange(len(lane)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    obs_lane = np.repeat(np.arange(len(chunk)), lengths + 1)
    obs_t = np.arange(len(obs_lane)) - np.repeat(np.cumsum(lengths + 1) - lengths - 1, lengths + 1)
    steps, observations = _columns_of(batch)
    padded = {name: _spread(column, t, lane, (longest, len(chunk))) for name, column in steps.items()}
    padded_obs = {
        name: _spread(column, obs_t, obs_lane, (longest + 1, len(chunk))) for name, column in observations.items()
    }
    end = batch.table["end"][chunk]
    return TimeMajor(
        obs=nest(batch.observation_space, padded_obs, "obs"),
        actions=nest(batch.action_space, padded, "actions"),
        rewards=padded["rewards"],
        mask=np.arange(longest)[:, None] < lengths,
        lengths=lengths,
        terminated=end == ChunkEnd.TERMINATED,
        truncated=end == ChunkEnd.TRUNCATED,
        chunk=chunk,
        state_in={n.removeprefix(_STATE_IN): c.copy() for n, c in batch.columns.items() if n.startswith(_STATE_IN)},
        columns=_further(padded),
    )


def _columns_of(batch: ChunkBatch) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    """Return step columns and observation columns."""
    steps, observations = {}, {}
    for name, column in batch.columns.items():
        if name == "obs" or name.startswith("obs/"):
            observations[name] = column
        elif not name.startswith((_STATE_IN, LOOKBACK)):
            steps[name] = column
    return steps, observations


def _further(steps: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    return {n: c for n, c in steps.items() if n not in _FIXED and n != "actions" and not n.startswith("actions/")}


def _spread(
    column: NDArray[Any], t: NDArray[np.int64], lane: NDArray[np.int64], shape: tuple[int, int]
) -> NDArray[Any]:
    padded = np.zeros((*shape, *column.shape[1:]), column.dtype)
    padded[t, lane] = column
    return padded
