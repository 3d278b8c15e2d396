"""Continuity of episodes at the learner: chunks in order and without gaps, or one ABORTED marker as the end.

A source numbers its batches without holes. While every batch arrives there is nothing to check: only the open episode
in each *place* is kept, in a few array writes for each batch.

A place is an env, an agent there by its name, and the module that plays it. The batches of one module come in order
among themselves; those of another module of the same cut may come before or after.

Where a batch is missing, the next chunk of each place shows whether an episode lost a part. Such an episode is ended by
a marker, and its later chunks are left out. A place without a further chunk is ended with its source.
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
    """The kept part of a batch after a gap, the markers to hand out before it, and the counts of the part left out."""

    batch: ChunkBatch
    markers: ChunkBatch | None
    left_out: Count


class SourceEpisodes:
    """The episodes of one source (slot, incarnation) that are open at the learner. Each batch is of one module."""

    def __init__(self) -> None:
        self.gap_reason = ""
        """Reason for which batches of this source are missing; "" while none are."""
        self._open = np.zeros((0, 1), CHUNK_TABLE)
        """By env and player: the newest chunk there. Its `t_start` is where it stops, its `agent` the player."""
        self._players: dict[tuple[str, str], int] = {}
        """(agent, module) -> column of `_open`."""
        self._broken: dict[tuple[int, int], tuple[int, int]] = {}
        """By env and player: the episode that a marker has ended there. Further chunks of it may still arrive."""
        self._templates: dict[str, ChunkBatch] = {}
        """By module: a batch of no chunks with its spaces and columns, from which markers are made."""

    def take(self, batch: ChunkBatch) -> FilteredBatch:
        """Return the part of the next batch to hand out: all of it as long as no batch before it is missing."""
        if self.gap_reason:
            return self.filter(batch)
        self.observe(batch)
        return FilteredBatch(batch, None, (0, 0))

    def observe(self, batch: ChunkBatch) -> None:
        """Note which episodes go on after this batch."""
        if not len(batch):
            return
        rows = self._rows(batch)
        # Chunks of one place stand in order, and numpy keeps the last of repeated indices.
        ordered = rows[_in_order(rows)] if rows["length"].min() == 0 else rows
        self._open[ordered["env_index"], ordered["agent"]] = ordered

    def filter(self, batch: ChunkBatch) -> FilteredBatch:
        """Keep the chunks of a batch after a gap that continue or begin an episode; leave out the others."""
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
        """End all open episodes, since no more batches come from this source.

        Return one batch of markers for each module with an open episode.
        """
        by_module: dict[str, list[np.void]] = {}
        modules = [module_id for _, module_id in self._players]
        for row in self._open.reshape(-1):
            if _is_open(row):
                by_module.setdefault(modules[row["agent"]], []).append(row)
        self._open = np.zeros((0, 1), CHUNK_TABLE)
        return [self._markers(module_id, rows, reason) for module_id, rows in by_module.items()]

    def _rows(self, batch: ChunkBatch) -> NDArray[np.void]:
        """Return the batch's table in the form of `_open`, which is made wide enough for it."""
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
        """Return whether a chunk continues what the learner has; abort an open episode there that cannot go on."""
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
            # It began in a missing batch, or was given to this learner's predecessor, whose user must hear of its end.
            self._broken[place] = episode
            aborted.append(_just_before(row, begins))
        return False

    def _markers(self, module_id: str, rows: Sequence[np.void], reason: str) -> ChunkBatch:
        """Make one ABORTED chunk of no steps after each of `rows`, all of one module."""
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
    # New arrays: even a view of no rows would keep the whole message in memory.
    columns = {name: np.empty((0, *column.shape[1:]), column.dtype) for name, column in batch.columns.items()}
    table = np.empty(0, CHUNK_TABLE)
    return replace(batch, table=table, columns=columns, infos={}, seq=0, order=None, connector_update={})


def _stops(batch: ChunkBatch) -> NDArray[np.int64]:
    """Return the env step after each chunk's last; an agent that pauses has fewer steps than its env."""
    table, env_t = batch.table, batch.columns.get("env_t")
    stops: NDArray[np.int64] = table["t_start"] + table["length"]
    if env_t is not None and len(env_t):
        has_steps = table["length"] > 0
        stops[has_steps] = env_t[batch.offsets[1:][has_steps] - 1] + 1
    return stops


def _in_order(table: NDArray[np.void]) -> NDArray[np.intp]:
    """Return rows in the order of events in each env.

    A worker writes end markers last, but they end episodes of earlier batches, and other episodes have begun in their
    place since.
    """
    return np.argsort(table["length"] > 0, kind="stable")


def _episode(row: np.void) -> tuple[int, int]:
    return int(row["id_high"]), int(row["id_low"])


def _is_open(row: np.void) -> bool:
    """Return whether the learner has chunks of this episode and not its end."""
    return bool(row["length"] and row["end"] == ChunkEnd.ONGOING)


def _just_before(row: np.void, begins: int) -> np.void:
    """Return a row for an imagined chunk that ends where `row` begins."""
    before = row.copy()
    before["t_start"] = begins
    before["chunk_index"] -= 1
    before["length"] = 0
    return before
