"""Per episode, chunks reach the learner in order and without gaps, or the episode is ended by one ABORTED marker.

A source numbers its batches without holes, so within it nothing needs checking while every batch arrives: only which
episode is open in each *place* is kept, in a few array writes a batch. A place is an env, an agent there by its name,
and the module that plays it: a module's batches come in order among themselves, while those of another module of the
same cut may come before or after. Where a batch is missing, the episodes that it would have continued are found chunk
by chunk as their places go on, ended by markers, and their later chunks left out; a place that nobody takes again is
ended with its source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.batch import ChunkBatch
from headrace.schemas.chunk import CHUNK_TABLE, ChunkEnd
from headrace.schemas.ledger import Count


@dataclass(frozen=True, slots=True)
class FilteredBatch:
    """What is left of a batch after a gap, the markers to be given out before it, and the count of what is left out."""

    batch: ChunkBatch
    markers: ChunkBatch | None
    left_out: Count


class SourceEpisodes:
    """The episodes of one source (slot, incarnation) that are open at the learner. Each batch is of one module."""

    def __init__(self) -> None:
        self.gap_reason = ""
        """Why batches of this source are missing, once some are."""
        self._open = np.zeros((0, 1), CHUNK_TABLE)
        """By env and player: the newest chunk there; its `t_start` is where it stops, its `agent` the player."""
        self._players: dict[tuple[str, str], int] = {}
        """(agent, module) -> column of `_open`."""
        self._broken: dict[tuple[int, int], tuple[int, int]] = {}
        """By env and player: the episode there that has been ended by a marker and may still go on arriving."""
        self._templates: dict[str, ChunkBatch] = {}
        """By module: a batch of no chunks with its spaces and columns, which markers are made of."""

    def take(self, batch: ChunkBatch) -> FilteredBatch:
        """What of the next batch may be handed out; all of it as long as no batch before it is missing."""
        if self.gap_reason:
            return self.filter(batch)
        self.observe(batch)
        return FilteredBatch(batch, None, (0, 0))

    def observe(self, batch: ChunkBatch) -> None:
        """Note which episodes go on after this batch."""
        if not len(batch):
            return
        rows = self._rows(batch)
        # Several chunks of one place stand in their order, and of repeated indices numpy keeps the last.
        ordered = rows[_in_order(rows)] if rows["length"].min() == 0 else rows
        self._open[ordered["env_index"], ordered["agent"]] = ordered

    def filter(self, batch: ChunkBatch) -> FilteredBatch:
        """A batch after a gap: keep the chunks that continue an open episode or begin one, leave out the others."""
        rows = self._rows(batch)
        keep = np.ones(len(batch), np.bool_)
        aborted: list[np.void] = []
        for i in _in_order(rows):
            row = rows[i]
            keep[i] = self._continues(row, int(batch.table["t_start"][i]), aborted)
            if keep[i]:
                self._open[row["env_index"], row["agent"]] = row
        kept = batch if keep.all() else batch.select(keep)
        left_out = (batch.steps - kept.steps, len(batch) - len(kept))
        markers = self._markers(batch.modules[0], aborted, self.gap_reason) if aborted else None
        return FilteredBatch(kept, markers, left_out)

    def end(self, reason: str) -> list[ChunkBatch]:
        """Markers for all open episodes, a batch for each module that has any: nothing more comes of this source."""
        by_module: dict[str, list[np.void]] = {}
        modules = [module_id for _, module_id in self._players]
        for row in self._open.reshape(-1):
            if _is_open(row):
                by_module.setdefault(modules[row["agent"]], []).append(row)
        self._open = np.zeros((0, 1), CHUNK_TABLE)
        return [self._markers(module_id, rows, reason) for module_id, rows in by_module.items()]

    def _rows(self, batch: ChunkBatch) -> NDArray[np.void]:
        """The batch's table as `_open` has it, which is made wide enough for it."""
        (module_id,) = batch.modules
        if module_id not in self._templates:
            self._templates[module_id] = _empty(batch)
        rows = batch.table.copy()
        players = [self._players.setdefault((agent, module_id), len(self._players)) for agent in batch.agents]
        if players != list(range(len(players))):
            rows["agent"] = np.array(players, np.uint16)[rows["agent"]]
        rows["t_start"] = _stops(batch)
        self._grow(int(rows["env_index"].max(initial=0)) + 1)
        return rows

    def _grow(self, envs: int) -> None:
        players = len(self._players)
        if self._open.shape[0] < envs or self._open.shape[1] < players:
            shape = (max(self._open.shape[0], envs), max(self._open.shape[1], players))
            grown = np.zeros(shape, CHUNK_TABLE)
            grown[: self._open.shape[0], : self._open.shape[1]] = self._open
            self._open = grown

    def _continues(self, row: np.void, begins: int, aborted: list[np.void]) -> bool:
        """Whether a chunk follows on what the learner has; an episode open there that cannot go on is aborted."""
        place, episode = (int(row["env_index"]), int(row["agent"])), _episode(row)
        last = self._open[place]
        if _is_open(last):
            if _episode(last) == episode and row["chunk_index"] == last["chunk_index"] + 1:
                return True
            aborted.append(last.copy())
            self._broken[place] = _episode(last)
            self._open[place] = np.zeros((), CHUNK_TABLE)
        if row["chunk_index"] == 0:
            self._broken.pop(place, None)
            return True
        if self._broken.get(place) != episode:
            # Begun in a batch that is missing, or given to this learner's predecessor: who has its beginning is told.
            self._broken[place] = episode
            aborted.append(_just_before(row, begins))
        return False

    def _markers(self, module_id: str, rows: Sequence[np.void], reason: str) -> ChunkBatch:
        """One ABORTED chunk of no steps after each of `rows`, all of one module."""
        names = [agent for agent, _ in self._players]
        table = np.array(rows, CHUNK_TABLE)
        players, table["agent"] = np.unique(table["agent"], return_inverse=True)
        table["chunk_index"] += 1
        table["length"] = table["lookback"] = table["module"] = 0
        table["end"] = ChunkEnd.ABORTED
        table["reason"] = 1
        agents = [names[player] for player in players]
        return replace(self._templates[module_id], table=table, agents=agents, reasons=("", reason))


def _empty(batch: ChunkBatch) -> ChunkBatch:
    # New arrays: a view of none of a batch's rows would still keep the whole message in memory.
    columns = {name: np.empty((0, *column.shape[1:]), column.dtype) for name, column in batch.columns.items()}
    table = np.empty(0, CHUNK_TABLE)
    return replace(batch, table=table, columns=columns, infos={}, seq=0, order=None, connector_update={})


def _stops(batch: ChunkBatch) -> NDArray[np.int64]:
    """The env step after each chunk's last; an agent that pauses has fewer steps than its env between two of them."""
    table, env_t = batch.table, batch.columns.get("env_t")
    stops: NDArray[np.int64] = table["t_start"] + table["length"]
    if env_t is not None and len(env_t):
        has_steps = table["length"] > 0
        stops[has_steps] = env_t[batch.offsets[1:][has_steps] - 1] + 1
    return stops


def _in_order(table: NDArray[np.void]) -> NDArray[np.intp]:
    """Rows in the order in which things happened in each env: a worker writes end markers last, but they end episodes
    of earlier batches, in whose place others have begun since."""
    return np.argsort(table["length"] > 0, kind="stable")


def _episode(row: np.void) -> tuple[int, int]:
    return int(row["id_high"]), int(row["id_low"])


def _is_open(row: np.void) -> bool:
    """The learner has chunks of this episode, and not its end."""
    return bool(row["length"] and row["end"] == ChunkEnd.ONGOING)


def _just_before(row: np.void, begins: int) -> np.void:
    """As if of a chunk that ends where `row` begins."""
    before = row.copy()
    before["t_start"] = begins
    before["chunk_index"] -= 1
    before["length"] = 0
    return before
