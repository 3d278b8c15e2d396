"""A replay buffer of columns: the newest transitions of the stream, each with what n steps of reward add up to."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.learner_stub.rollouts.tensors import to_torch
from headrace.schemas.chunks.batch import ChunkBatch, is_obs_column
from headrace.schemas.chunks.spaces import Spaces, nest
from headrace.schemas.errors import ModuleError

Columns = dict[str, NDArray[Any]]


class ReplayBuffer:
    """The newest `size` transitions, in arrays that are made once and overwritten in turn.

    Memory grows with the rows that have been written, up to two observations for each of `size` transitions.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._columns: Columns = {}
        self._added = 0

    def __len__(self) -> int:
        return min(self._added, self.size)

    def add(self, batch: ChunkBatch, *, gamma: float, n_step: int) -> None:
        """Add each step of `batch` once, as `n_step_columns` describes. Raises `ModuleError` if memory does not do."""
        columns = n_step_columns(batch, gamma=gamma, n_step=n_step)
        if not self._columns:
            self._columns = {name: self._empty(name, column) for name, column in columns.items()}
        steps = len(columns["returns"])
        kept = slice(max(0, steps - self.size), steps)
        rows = (self._added + np.arange(steps)[kept]) % self.size
        for name, column in columns.items():
            self._columns[name][rows] = column[kept]
        self._added += steps

    def sample(self, random: np.random.Generator, rows: int, spaces: Spaces) -> dict[str, Any]:
        """Return tensors (rows, ...) of transitions drawn from all that are here: the names of `n_step_columns`.

        "obs" and "next_obs" are nested as the observation space is.
        """
        picked = random.integers(len(self), size=rows)
        taken = {name: column[picked] for name, column in self._columns.items()}
        nested: dict[str, Any] = {name: taken[name] for name in ("actions", "returns", "discounts")}
        for side in ("obs", "next_obs"):
            own = {n.removeprefix("next_"): c for n, c in taken.items() if n.split("/")[0] == side}
            nested[side] = nest(spaces.observation, own, "obs")
        return to_torch(nested)  # type: ignore[no-any-return]

    def _empty(self, name: str, column: NDArray[Any]) -> NDArray[Any]:
        shape = (self.size, *column.shape[1:])
        try:
            return np.empty(shape, column.dtype)
        except (MemoryError, ValueError) as error:
            raise ModuleError(
                f"there is no memory for {self.size:,} rows of {name} with {column[:1].nbytes:,} bytes each; lower "
                "learner.buffer_size"
            ) from error


def n_step_columns(batch: ChunkBatch, *, gamma: float, n_step: int) -> Columns:
    """Return the N steps of `batch` as transitions over up to `n_step` steps of their chunk.

    - obs, actions: (N, ...) of each step; "obs/..." for nested spaces.
    - returns: float32 (N,), the discounted sum of the next k rewards. k is n_step, or less where the chunk ends.
    - next_obs: (N, ...), the observation k steps later. At the end of an episode it is the env's true last one.
    - discounts: float32 (N,), gamma^k for the value of next_obs; 0 where the episode terminated in these k steps. An
      episode that was truncated, cut or aborted would have gone on.

    Sutton and Barto, Reinforcement Learning (2018), equation 7.1.
    """
    episodes = batch.episodes()
    lengths = np.diff(episodes.offsets)
    chunk = np.repeat(np.arange(len(lengths)), lengths)
    left = episodes.offsets[1:][chunk] - np.arange(len(episodes))
    ahead = np.minimum(left, n_step)
    returns = np.zeros(len(episodes))
    for k in range(n_step):
        counts = np.flatnonzero(ahead > k)
        returns[counts] += gamma**k * episodes.rewards[counts + k]
    ended = episodes.terminated[chunk] & (left <= n_step)
    observations = {name: column for name, column in batch.columns.items() if is_obs_column(name)}
    rows = episodes.step_rows
    return {
        **{name: column[rows] for name, column in observations.items()},
        **{f"next_{name}": column[rows + ahead] for name, column in observations.items()},
        "actions": np.asarray(batch.columns["actions"]),
        "returns": returns.astype(np.float32),
        "discounts": np.where(ended, 0.0, gamma**ahead).astype(np.float32),
    }
