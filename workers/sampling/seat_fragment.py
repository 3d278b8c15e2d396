"""The buffers of one module's seats. An action's step is complete when its agent observes again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.workers.envs.lane import Episode
from headrace.workers.sampling.episode_view import OpenRows
from headrace.workers.sampling.fragment import Fragment, Rows


class SeatFragment(Fragment):
    """A `Fragment` whose lanes are seats."""

    def __init__(self, width: int, capacity: int, observations: Mapping[str, NDArray[Any]]) -> None:
        super().__init__(width, capacity, observations)
        self._add("env_t", np.empty(0, np.int64))

    def widen(self, observations: Mapping[str, NDArray[Any]]) -> None:
        """Make room for more seats after the existing ones; `observations` are the wider columns."""
        old, self.width = self.width, len(next(iter(observations.values())))
        self._observations = observations
        for name, column in self.columns.items():
            wider = np.empty((self.width, *column.shape[1:]), column.dtype)
            wider[:old] = column
            self.columns[name] = wider
        self._seq = None
        self.open += [None] * (self.width - old)
        cursor = np.zeros(self.width, np.intp)
        cursor[:old] = self._cursor
        self._cursor = cursor

    def act_at(
        self, rows: Rows, columns: Mapping[str, NDArray[Any]], weights_seq: int, env_t: NDArray[np.int64]
    ) -> None:
        """Write observations and actions of the seats `rows`, with their env steps `env_t`, one for each of them."""
        self.aim(rows)
        self.put(columns, weights_seq)
        self.columns["env_t"][self._at(rows)] = env_t

    def rows_of(self, row: int, episode: Episode, *, pending: bool) -> OpenRows | None:
        """Return the open rows of a seat's `episode`, for callbacks; None if it has none."""
        chunk = self.open[row]
        if chunk is None or chunk.episode is not episode:
            chunk = next((chunk for chunk in reversed(self.ended) if chunk.episode is episode), None)
        if chunk is None:
            return None
        stop = self._stop(chunk)
        return OpenRows(self.columns, self._observations, chunk.infos, row, chunk.start, stop, pending)
