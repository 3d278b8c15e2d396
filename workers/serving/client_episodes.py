"""Episodes that clients cut by themselves: their chunks go on without gaps, and end when nobody else ends them.

Each open episode has an env index of its own in the worker's stream, beyond those of the worker's own envs: the learner
knows by it who goes on after whom. All rules are checked before anything is kept of a batch.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.batch import ChunkBatch
from headrace.schemas.chunk import CHUNK_TABLE, ChunkEnd
from headrace.schemas.ledger import Discard
from headrace.schemas.module_spaces import DEFAULT_MODULE_ID
from headrace.schemas.serving_errors import BadRequestError, ServerFullError

MOST_OPEN = 4096
"""Episodes of all clients together."""

_Id = tuple[int, int]


@dataclass(slots=True)
class _Owned:
    """Of one client: its open episodes with the newest row of each, and an empty batch of its columns."""

    rows: dict[_Id, np.void] = field(default_factory=dict)
    template: ChunkBatch | None = None


class ClientEpisodes:
    """`first_place` is the first env index that is not one of the worker's own. For one thread at a time."""

    def __init__(self, first_place: int) -> None:
        self._next_place = first_place
        self._free: list[int] = []
        self._owned: dict[object, _Owned] = {}
        self._open: dict[_Id, int] = {}
        """Place of each open episode of anybody."""

    def __len__(self) -> int:
        return len(self._open)

    def take(self, owner: object, batch: ChunkBatch) -> ChunkBatch:
        """The batch as it goes into the stream, with places.

        Raises `BadRequestError` for chunks that do not go on where those before have stopped, `ServerFullError` beyond
        `MOST_OPEN`; nothing is kept of it then.
        """
        if tuple(batch.modules) != (DEFAULT_MODULE_ID,) or len(batch.agents) != 1:
            raise BadRequestError(
                f"chunks of {list(batch.modules)!r:.80} and {list(batch.agents)!r:.80}; one agent's only"
            )
        owned = self._owned.get(owner, _Owned())
        rows = dict(owned.rows)
        for row in batch.table:
            self._check(row, rows)
        if len(self._open) + len(rows) - len(owned.rows) > MOST_OPEN:
            raise ServerFullError(f"{len(self._open)} episodes of clients are open; {MOST_OPEN} may be")
        table = batch.table.copy()
        for row in table:
            row["env_index"] = self._place(row)
        owned.rows, owned.template = {id: row.copy() for id, row in rows.items()}, _empty(batch)
        self._owned[owner] = owned
        return replace(batch, table=table)

    def lost(self, owner: object, reason: Discard) -> ChunkBatch | None:
        """An end marker for each open episode of `owner`, who is forgotten; None if there is none."""
        owned = self._owned.pop(owner, None)
        if owned is None or not owned.rows or owned.template is None:
            return None
        table = np.array(list(owned.rows.values()), CHUNK_TABLE)
        table["t_start"] = table["episode_length"]
        table["chunk_index"] += 1
        table["length"] = table["lookback"] = 0
        table["end"], table["reason"] = ChunkEnd.ABORTED, 1
        for row in table:
            row["env_index"] = self._place(row)
        return replace(owned.template, table=table, reasons=("", reason.value))

    def lost_all(self, reason: Discard) -> list[ChunkBatch]:
        """`lost` of everybody."""
        found = [self.lost(owner, reason) for owner in list(self._owned)]
        return [batch for batch in found if batch is not None]

    def _check(self, row: np.void, rows: dict[_Id, np.void]) -> None:
        id = _id(row)
        last = rows.get(id)
        chunk, begins, ends = int(row["chunk_index"]), int(row["t_start"]), int(row["t_start"]) + int(row["length"])
        goes_on = (int(last["chunk_index"]) + 1, int(last["episode_length"])) if last is not None else (0, 0)
        fits = (chunk, begins) == goes_on and int(row["episode_length"]) == ends
        if not fits or (last is None and (id in self._open or not row["length"])):
            raise BadRequestError(
                f"chunk {chunk} of episode {id[0]:016x}{id[1]:016x} begins at step {begins} and ends at "
                f"{int(row['episode_length'])}; after what was shipped before, "
                f"chunk {goes_on[0]} from step {goes_on[1]} on is due"
            )
        if row["end"] == ChunkEnd.ONGOING:
            rows[id] = row
        else:
            rows.pop(id, None)

    def _place(self, row: np.void) -> int:
        """That of the row's episode; free for another once this row has ended it."""
        id = _id(row)
        place = self._open.pop(id, None)
        if place is None:
            place = heapq.heappop(self._free) if self._free else self._next_place
            self._next_place = max(self._next_place, place + 1)
        if row["end"] == ChunkEnd.ONGOING:
            self._open[id] = place
        else:
            heapq.heappush(self._free, place)
        return place


def _id(row: np.void) -> _Id:
    return int(row["id_high"]), int(row["id_low"])


def _empty(batch: ChunkBatch) -> ChunkBatch:
    columns: dict[str, NDArray[np.generic]] = {
        name: np.empty((0, *column.shape[1:]), column.dtype) for name, column in batch.columns.items()
    }
    table = np.empty(0, CHUNK_TABLE)
    return replace(batch, table=table, columns=columns, infos={}, order=None, connector_update={})
