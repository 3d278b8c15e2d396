"""Buffers for lanes whose actions are answered some polls later. A lane's cursor advances when its answer comes.

Row r of a lane holds the observation and the action of step r and, once the action is answered, the reward. An action
that is pending at a cut is not part of that chunk: its observation is the chunk's last one, and the row becomes the
first row of the next fragment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.chunks.batch import is_obs_column
from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.workers.sampling.fragment import Fragment, OpenChunk

Rows = NDArray[np.intp]


class PendingFragment(Fragment):
    """A `Fragment` whose lanes act and get their answers at different times."""

    def __init__(self, width: int, capacity: int, observations: Mapping[str, NDArray[Any]]) -> None:
        super().__init__(width, capacity, observations)
        self._finals_kept = 0

    # -- one poll -----------------------------------------------------------------------------------------------------

    def act(self, rows: Rows, columns: Mapping[str, NDArray[Any]], weights_seq: int) -> None:
        """Write the actions of the lanes `rows`. `columns` have a row for every lane."""
        self.aim(None if len(rows) == self.width else rows)
        self.put(columns)
        self.columns["weights_seq"][self._where] = weights_seq

    def chosen(self, rows: Rows, names: Sequence[str]) -> dict[str, NDArray[Any]]:
        """Return the newest, unanswered actions of `rows`, in the columns `names`."""
        at = self._level if self._level is not None else self._cursor[rows]
        return {name: self.columns[name][rows, at] for name in names}

    def answer(self, rows: Rows, rewards: NDArray[np.float64]) -> None:
        """Complete the last steps of `rows`, whose actions are answered."""
        if self._level is not None and len(rows) == self.width:
            self.columns["rewards"][rows, self._level] = rewards
            self._level += 1
            return
        self._settle_cursors()
        at = self._cursor[rows]
        self.columns["rewards"][rows, at] = rewards
        self._cursor[rows] = at + 1

    def end(self, ended: Sequence[tuple[int, ChunkEnd]]) -> None:
        """End the episodes of these lanes, and forget chunks without a step."""
        rows: list[int] = []
        for row, end in ended:
            chunk = self.open[row]
            assert chunk is not None, "only an episode that was begun can end"
            self.open[row] = None
            if self.cursor(row) > chunk.start:
                chunk.stop, chunk.end, chunk.final = self.cursor(row), end, self._finals_kept + len(rows)
                self.ended.append(chunk)
                rows.append(row)
        self._keep_finals(rows)

    def _keep_finals(self, rows: list[int]) -> None:
        self._finals_kept += len(rows)
        for name, current in self._observations.items():
            self.finals[name].append(current[rows])

    # -- the end of the fragment --------------------------------------------------------------------------------------

    def take(
        self, pending: Sequence[int], unfinished: Sequence[OpenChunk], *, keep_open: bool
    ) -> tuple[list[OpenChunk], Self | None]:
        """Return the chunks to cut, by row and time, and the next fragment, or None if nothing continues in it.

        Rows of `pending` lanes continue there. With `keep_open` all open chunks continue too, and the `unfinished`
        chunks of `ended`, whose episodes go on with other agents.
        """
        kept = [chunk for chunk in self.open if chunk is not None] + list(unfinished) if keep_open else []
        moved = None
        if pending or kept:
            longest = max((self._stop(chunk) - chunk.start for chunk in kept), default=0)
            moved = type(self)(self.width, max(self.capacity, longest + 1), self._observations)
            self._move(moved, kept, np.array(pending, np.intp))
        if not keep_open:
            return super().take_chunks(keep_open=False)[0], moved
        left = set(map(id, unfinished))
        self.open = [None] * self.width
        self.ended = [chunk for chunk in self.ended if id(chunk) not in left]
        return super().take_chunks(keep_open=False)[0], moved

    def _stop(self, chunk: OpenChunk) -> int:
        return self.cursor(chunk.lane) if chunk.end is ChunkEnd.ONGOING else chunk.stop

    def _move(self, moved: Self, kept: Sequence[OpenChunk], pending: Rows) -> None:
        self._settle_cursors()
        moved._settle_cursors()
        for name, column in self.columns.items():
            if name not in moved.columns:
                moved._add(name, column[:, 0])
        for chunk in kept:
            self._move_chunk(moved, chunk)
        for name, column in self.columns.items():
            current = (
                self._observations[name][pending] if is_obs_column(name) else column[pending, self._cursor[pending]]
            )
            moved.columns[name][pending, moved._cursor[pending]] = current

    def _move_chunk(self, moved: Self, chunk: OpenChunk) -> None:
        row, stop = chunk.lane, self._stop(chunk)
        steps = stop - chunk.start
        for name, column in self.columns.items():
            moved.columns[name][row, :steps] = column[row, chunk.start : stop]
        moved._cursor[row] = steps
        if chunk.end is ChunkEnd.ONGOING:
            moved.open[row] = chunk
        else:
            for name, parts in self.finals.items():
                moved.finals[name].append(np.concatenate(parts)[chunk.final, None])
            chunk.final, moved._finals_kept = moved._finals_kept, moved._finals_kept + 1
            chunk.stop = steps
            moved.ended.append(chunk)
        chunk.start = 0
