"""The buffers that hold a vector's steps until they are cut into chunks.

    column "rewards"  (envs, capacity)          lane 0  ▮▮▮▮▮▮▮▮│▯▯     row r: what happened at the lane's r-th step
                                                lane 1  ▮▮▮│▮▮▮▮▮▮
    column "obs"      (envs, capacity + 1)      lane 0  ▮▮▮▮▮▮▮▮▮▯      row r: the observation before that step

Each lane has a cursor, the row of its next step, and the row where its open chunk starts. The cursor advances when the
action is answered: in the same poll in lock-step, otherwise some polls later. An action that is pending at a cut is not
part of that chunk: its observation is the chunk's last one, and the row becomes the first row of the next fragment.

The rows of an aborted chunk are overwritten, so a lane has no holes. The final observation of an episode has no row,
because the next episode's first one takes its place; it is kept separately. Each fragment has new buffers and gives
them away with the batch. So nothing is copied when all lanes filled all rows and no episode ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.chunks.batch import is_obs_column
from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.errors import ModuleError
from headrace.workers.envs.lane import Episode
from headrace.workers.policy.module_protocol import OUTPUTS, SplitAct

ChunkInfos = dict[int, dict[str, Any]]
Rows = NDArray[np.intp]
_ALL = slice(None)


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
    """The steps of `width` lanes since the last cut. The policy's columns are added when they first come.

    With `split`, steps may have the column `OUTPUTS`, from which `complete` makes other columns at the cut.
    """

    def __init__(
        self, width: int, capacity: int, observations: Mapping[str, NDArray[Any]], split: SplitAct | None = None
    ) -> None:
        self.width = width
        self.capacity = capacity
        self.split = split
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
        self._finals_kept = 0
        self._level: int | None = 0
        """The row of all cursors while they are equal, which saves index arrays; else None."""
        self._cursor: Rows = np.zeros(width, np.intp)
        self._where: Any = None
        self._from: Rows | None = None
        """The lanes of the step that is being written; None: all of them."""
        self._shapes: dict[str, tuple[int, ...]] = {}
        """The shapes in which the policy's columns last came, by name."""
        self._seq: int | None = None
        """The number of the weights that all rows from `_level` on already bear."""

    # -- one poll -----------------------------------------------------------------------------------------------------

    def aim(self, acting: Rows | None) -> None:
        """Begin a step of the lanes `acting` (None: all): make room, and write their current observations."""
        if self._level is not None and (acting is None or len(acting) == self.width):
            if self._level >= self.capacity:
                self._grow()
            self._where, self._from = (_ALL, self._level), None
        else:
            self._settle_cursors()
            lanes = np.arange(self.width) if acting is None else acting
            if np.maximum.reduce(self._cursor) >= self.capacity:
                self._grow()
            self._where, self._from = (lanes, self._cursor[lanes]), lanes
        where, some = self._where, self._from
        for name, current in self._observations.items():
            self.columns[name][where] = current if some is None else current[some]

    def put(self, columns: Mapping[str, NDArray[Any]], weights_seq: int) -> None:
        """Write the policy's columns (width, ...) at the cursors of the acting lanes.

        `weights_seq` is of all steps, unless a column of that name tells it for each row.

        Call it before the step, since an env may change its action. Raises `ModuleError` for a column whose dtype or
        shape has changed.
        """
        where, lanes = self._where, self._from
        for name, values in columns.items():
            column = self.columns.get(name)
            if column is None:
                column = self._add(name, values)
            if values.shape != self._shapes.get(name) or values.dtype is not column.dtype:
                self._check_form(name, values, column)
            column[where] = values if lanes is None else values[lanes]
        if "weights_seq" in columns:
            self._seq = None
        elif lanes is not None:
            self.columns["weights_seq"][where] = weights_seq
        elif weights_seq != self._seq:
            self.columns["weights_seq"][:, self._level :] = self._seq = weights_seq

    def _check_form(self, name: str, values: NDArray[Any], column: NDArray[Any]) -> None:
        if values.dtype != column.dtype or values.shape[1:] != column.shape[2:]:
            was, now = (column.dtype, column.shape[2:]), (values.dtype, values.shape[1:])
            raise ModuleError(f"the module's column {name!r} was {was} a step and is now {now}; keep it the same")
        self._shapes[name] = values.shape

    def complete(self, columns: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Return step `columns` (rows, ...) with those that `split` makes, in the place of `OUTPUTS`."""
        if self.split is None or OUTPUTS not in columns:
            return dict(columns)
        made = self.split.complete(columns)
        return {
            each: column
            for name, known in columns.items()
            for each, column in (made.items() if name == OUTPUTS else ((name, known),))
        }

    def complete_steps(self) -> None:
        """Make all columns of the steps so far. From now on each step must bring all of them."""
        split, self.split = self.split, None
        if split is None or OUTPUTS not in self.columns:
            return
        recorded = {name: column for name, column in self.columns.items() if not is_obs_column(name)}
        for lane in range(self.width):
            stop = self.cursor(lane)
            for name, rows in split.complete({name: column[lane, :stop] for name, column in recorded.items()}).items():
                column = self.columns.get(name)
                (self._add(name, rows) if column is None else column)[lane, :stop] = rows
        del self.columns[OUTPUTS]

    def chosen(self, lanes: Rows | None, names: Sequence[str]) -> dict[str, NDArray[Any]]:
        """Return copies of the newest actions of `lanes` (None: those that acted last), in the columns `names`.

        Call it before `answer`.
        """
        where = self._at(lanes)
        return {name: self.columns[name][where].copy() for name in names}

    def answer(self, lanes: Rows | None, rewards: NDArray[np.float64]) -> None:
        """Complete the steps of `lanes` (None: those that acted last), and advance their cursors."""
        if lanes is not None and len(lanes) < self.width:
            self._settle_cursors()
        where = self._where if lanes is None else self._at(lanes)
        self.columns["rewards"][where] = rewards
        if self._level is not None:
            self._level += 1
        else:
            self._cursor[where[0]] += 1

    def _at(self, lanes: Rows | None) -> Any:
        """Return the rows of the newest steps of `lanes` (None: those that acted last)."""
        if lanes is None:
            return self._where
        return lanes, (self._level if self._level is not None else self._cursor[lanes])

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
        """End the episodes of these lanes. Their current observations are the final ones.

        Forgets chunks without a step.
        """
        lanes: list[int] = []
        for lane, end in ended:
            chunk, stop = self.open[lane], self.cursor(lane)
            assert chunk is not None, "only an episode that was begun can end"
            self.open[lane] = None
            if stop > chunk.start:
                chunk.stop, chunk.end, chunk.final = stop, end, self._finals_kept + len(lanes)
                self.ended.append(chunk)
                lanes.append(lane)
        self._finals_kept += len(lanes)
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

    def take_chunks(
        self, pending: Sequence[int], unfinished: Sequence[OpenChunk] = (), *, keep_open: bool
    ) -> tuple[list[OpenChunk], Self | None]:
        """Return the chunks to cut, by lane and time, and the next fragment, or None if nothing continues in it.

        Rows of `pending` lanes continue there. With `keep_open` all open chunks continue too, and the `unfinished`
        chunks of `ended`, whose episodes go on with other agents. Without it, open chunks with a step are cut here. Do
        not call `aim` after this: the columns are about to be given away.
        """
        kept = [chunk for chunk in self.open if chunk is not None] + list(unfinished) if keep_open else []
        moved = None
        if pending or kept:
            longest = max((self._stop(chunk) - chunk.start for chunk in kept), default=0)
            moved = type(self)(self.width, max(self.capacity, longest + 1), self._observations)
            moved.split = self.split
            self._move(moved, kept, np.array(pending, np.intp))
        if keep_open:
            left = set(map(id, unfinished))
            chunks = [chunk for chunk in self.ended if id(chunk) not in left]
        else:
            chunks = self.ended + self._cut_open()
        chunks.sort(key=lambda chunk: (chunk.lane, chunk.start))
        return chunks, moved

    def _cut_open(self) -> list[OpenChunk]:
        cut = []
        for lane, chunk in enumerate(self.open):
            if chunk is None:
                continue
            chunk.stop = self.cursor(lane)
            for name, current in self._observations.items():
                self.columns[name][lane, chunk.stop] = current[lane]
            if chunk.stop > chunk.start:
                cut.append(chunk)
        return cut

    def is_rectangle(self, chunks: Sequence[OpenChunk]) -> bool:
        """Return whether `chunks` are all lanes whole, from the first row to the last, so that columns need no copy."""
        is_full = self._level == self.capacity and len(chunks) == self.width
        return is_full and not any(chunk.start or chunk.final >= 0 for chunk in chunks)

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
        here, there = self._cursor[pending], moved._cursor[pending]
        for name, column in self.columns.items():
            current = self._observations[name][pending] if is_obs_column(name) else column[pending, here]
            moved.columns[name][pending, there] = current

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
        self._seq = None
