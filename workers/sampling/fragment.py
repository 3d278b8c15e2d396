"""The buffers that hold a vector's steps until they are cut into chunks.

    column "rewards"  (envs, capacity)          lane 0  ▮▮▮▮▮▮▮▮│▯▯     row r: what happened at the lane's r-th step
                                                lane 1  ▮▮▮│▮▮▮▮▮▮
    column "obs"      (envs, capacity + 1)      lane 0  ▮▮▮▮▮▮▮▮▮▯      row r: the observation before that step

Each lane has a cursor, the row of its next step, and the row where its open chunk starts. The rows of an aborted chunk
are overwritten, so a lane has no holes. The final observation of an episode has no row, because the next episode's
first one takes its place; it is kept separately. Each fragment has new buffers and gives them away with the batch. So
nothing is copied when all lanes filled all rows and no episode ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.chunks.batch import is_obs_column
from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.errors import ModuleError
from headrace.workers.envs.lane import Episode

ChunkInfos = dict[int, dict[str, Any]]


@dataclass(slots=True, eq=False)
class OpenChunk:
    """Rows `start:stop` of a lane, from one episode.

    `final` is the index of its last observation among the final ones kept separately, or -1. `state_in` is the state of
    a recurrent module before its first row.
    """

    lane: int
    episode: Episode
    start: int
    state_in: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    infos: ChunkInfos = field(default_factory=dict)
    stop: int = -1
    end: ChunkEnd = ChunkEnd.ONGOING
    final: int = -1


class Fragment:
    """The steps of `width` lanes since the last cut. The policy's columns are added when they first come."""

    def __init__(self, width: int, capacity: int, observations: Mapping[str, NDArray[Any]]) -> None:
        self.width = width
        self.capacity = capacity
        self.columns: dict[str, NDArray[Any]] = {
            name: np.empty((width, capacity + 1, *current.shape[1:]), current.dtype)
            for name, current in observations.items()
        }
        self._observations = observations
        self._add("rewards", np.empty(0, np.float64))
        self._add("weights_seq", np.empty(0, np.int64))
        self.open: list[OpenChunk | None] = [None] * width
        self.ended: list[OpenChunk] = []
        self.finals: dict[str, list[NDArray[Any]]] = {name: [] for name in observations}
        self._level: int | None = 0
        """The row of all cursors while they are equal, which saves index arrays; else None."""
        self._cursor: NDArray[np.intp] = np.zeros(width, np.intp)
        self._where: Any = None
        self._from: Any = slice(None)

    # -- one poll -----------------------------------------------------------------------------------------------------

    def aim(self, live: NDArray[np.intp] | None) -> None:
        """Begin a poll of the lanes `live` (None: all): make room, and write their current observations."""
        if self._level is not None and live is None:
            if self._level >= self.capacity:
                self._grow()
            self._where, self._from = (slice(None), self._level), slice(None)
        else:
            self._settle_cursors()
            lanes = np.arange(self.width) if live is None else live
            if np.maximum.reduce(self._cursor) >= self.capacity:
                self._grow()
            self._where, self._from = (lanes, self._cursor[lanes]), lanes
        for name, current in self._observations.items():
            self.columns[name][self._where] = current[self._from]

    def put(self, columns: Mapping[str, NDArray[Any]]) -> None:
        """Write the policy's columns (width, ...) at the cursors.

        Call it before the step, since an env may change its action. Raises `ModuleError` for a column whose dtype or
        shape has changed.
        """
        for name, values in columns.items():
            column = self.columns.get(name)
            if column is None:
                column = self._add(name, values)
            elif values.dtype != column.dtype or values.shape[1:] != column.shape[2:]:
                was, now = (column.dtype, column.shape[2:]), (values.dtype, values.shape[1:])
                raise ModuleError(f"the module's column {name!r} was {was} a step and is now {now}; keep it the same")
            column[self._where] = values[self._from]

    def advance(self, rewards: NDArray[np.float64], weights_seq: int) -> None:
        """Write the rewards of the live lanes, in their order, and advance their cursors."""
        self.columns["rewards"][self._where] = rewards
        self.columns["weights_seq"][self._where] = weights_seq
        if self._level is not None:
            self._level += 1
        else:
            self._cursor[self._where[0]] += 1

    # -- episodes -----------------------------------------------------------------------------------------------------

    def cursor(self, lane: int) -> int:
        """Return the row of the lane's next step."""
        return self._level if self._level is not None else int(self._cursor[lane])

    def begin(self, lane: int, episode: Episode, state_in: Mapping[str, NDArray[Any]]) -> None:
        """Open a chunk of `episode` at the lane's cursor."""
        self.open[lane] = OpenChunk(lane, episode, self.cursor(lane), state_in)

    def add_info(self, lane: int, info: dict[str, Any]) -> None:
        """Keep the info of the lane's current observation."""
        chunk = self.open[lane]
        if chunk is not None:
            chunk.infos[self.cursor(lane) - chunk.start] = dict(info)

    def end(self, ended: Sequence[tuple[int, ChunkEnd]]) -> None:
        """End the episodes of these lanes. Their current observations are the final ones."""
        kept = len(self.ended)
        for place, (lane, end) in enumerate(ended):
            chunk = self.open[lane]
            assert chunk is not None, "only an episode that was begun can end"
            chunk.stop, chunk.end, chunk.final = self.cursor(lane), end, kept + place
            self.ended.append(chunk)
            self.open[lane] = None
        lanes = [lane for lane, _ in ended]
        for name, current in self._observations.items():
            self.finals[name].append(current[lanes])

    def abort(self, lane: int) -> tuple[Episode, int] | None:
        """Drop the lane's open chunk. Return its episode and the number of steps lost, or None without a chunk."""
        chunk = self.open[lane]
        if chunk is None:
            return None
        steps = self.cursor(lane) - chunk.start
        if steps:
            self._settle_cursors()
            self._cursor[lane] = chunk.start
        self.open[lane] = None
        return chunk.episode, steps

    # -- the end of the fragment --------------------------------------------------------------------------------------

    def take_chunks(self, *, keep_open: bool) -> tuple[list[OpenChunk], Fragment | None]:
        """Return all chunks with a step, by lane and time, and the fragment with the open chunks or None.

        With `keep_open` the open chunks move to the returned fragment; else they are cut here. Do not call `aim` after
        this: the columns are about to be given away.
        """
        chunks, moved = self.ended, None
        if keep_open:
            moved = self._carry()
        else:
            for lane, chunk in enumerate(self.open):
                if chunk is None:
                    continue
                chunk.stop = self.cursor(lane)
                for name, current in self._observations.items():
                    self.columns[name][lane, chunk.stop] = current[lane]
                if chunk.stop > chunk.start:
                    chunks.append(chunk)
        chunks.sort(key=_lane_and_start)
        return chunks, moved

    def is_rectangle(self, chunks: Sequence[OpenChunk]) -> bool:
        """Return whether `chunks` are all lanes whole, from the first row to the last, so that columns need no copy."""
        return (
            self._level == self.capacity
            and len(chunks) == self.width
            and not any(chunk.start or chunk.final >= 0 for chunk in chunks)
        )

    def _carry(self) -> Fragment:
        longest = max((self.cursor(c.lane) - c.start for c in self.open if c is not None), default=0)
        moved = Fragment(self.width, max(self.capacity, longest), self._observations)
        moved._settle_cursors()
        for name, column in self.columns.items():
            if name not in moved.columns:
                moved._add(name, column[0])
        for chunk in self.open:
            if chunk is None:
                continue
            stop = self.cursor(chunk.lane)
            steps = stop - chunk.start
            for name, column in self.columns.items():
                moved.columns[name][chunk.lane, :steps] = column[chunk.lane, chunk.start : stop]
            moved._cursor[chunk.lane] = steps
            chunk.start = 0
            moved.open[chunk.lane] = chunk
        return moved

    def _add(self, name: str, values: NDArray[Any]) -> NDArray[Any]:
        """Add a step column for values (width, ...) and return it."""
        column = np.empty((self.width, self.capacity, *values.shape[1:]), values.dtype)
        self.columns[name] = column
        return column

    def _settle_cursors(self) -> None:
        if self._level is not None:
            self._cursor[:] = self._level
            self._level = None

    def _grow(self) -> None:
        """Double the rows. Needed only for fragments of whole episodes, whose length is not known."""
        used, self.capacity = self.capacity, 2 * self.capacity
        for name, column in self.columns.items():
            extra = 1 if is_obs_column(name) else 0
            larger = np.empty((self.width, self.capacity + extra, *column.shape[2:]), column.dtype)
            larger[:, :used] = column[:, :used]
            self.columns[name] = larger


def _lane_and_start(chunk: OpenChunk) -> tuple[int, int]:
    return chunk.lane, chunk.start
