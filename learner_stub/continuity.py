"""Per episode, chunks reach the learner in order and without gaps, or the episode is ended by one ABORTED marker.

A source numbers its batches without holes, so within it nothing needs checking while every batch arrives: only which
episode is open in which env (and agent) is kept, in a few array writes a batch. Where a batch is missing, the episodes
that it would have continued are found chunk by chunk, ended by markers, and their later chunks left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.batch import ChunkBatch
from headrace.schemas.chunk import CHUNK_TABLE, ChunkEnd
from headrace.schemas.ledger import Count


@dataclass(frozen=True, slots=True)
class Sifted:
    """What is left of a batch after a gap, the markers to be given out before it, and the count of what is left out."""

    batch: ChunkBatch
    markers: ChunkBatch | None
    left_out: Count


class SourceEpisodes:
    """The episodes of one source (slot, incarnation) that are open at the learner."""

    def __init__(self) -> None:
        self.gap_reason = ""
        """Why batches of this source are missing, once some are."""
        self._open = np.zeros((0, 1), CHUNK_TABLE)
        self._broken: dict[tuple[int, int], tuple[int, int]] = {}
        """By env and agent: the episode there that has been ended by a marker and may still go on arriving."""
        self._template: ChunkBatch | None = None
        """A batch of no chunks with this source's spaces and columns, which markers are made of."""

    def take(self, batch: ChunkBatch) -> Sifted:
        """What of the next batch may be handed out; all of it as long as no batch before it is missing."""
        if self.gap_reason:
            return self.sift(batch)
        self.observe(batch)
        return Sifted(batch, None, (0, 0))

    def observe(self, batch: ChunkBatch) -> None:
        """Note which episodes go on after this batch."""
        table = batch.table
        if not len(table):
            return
        self._remember(batch)
        self._grow(int(table["env_index"].max()) + 1, int(table["agent"].max()) + 1)
        # Several chunks of one env stand in their order, and of repeated indices numpy keeps the last.
        ordered = table[_in_order(table)] if table["length"].min() == 0 else table
        self._open[ordered["env_index"], ordered["agent"]] = ordered

    def sift(self, batch: ChunkBatch) -> Sifted:
        """A batch after a gap: keep the chunks that continue an open episode or begin one, leave out the others."""
        self._remember(batch)
        keep = np.ones(len(batch), np.bool_)
        aborted: list[np.void] = []
        for i in _in_order(batch.table):
            row = batch.table[i]
            keep[i] = self._continues(row, aborted)
            if keep[i]:
                self._open[row["env_index"], row["agent"]] = row
        kept = batch if keep.all() else batch.select(keep)
        left_out = (batch.steps - kept.steps, len(batch) - len(kept))
        return Sifted(kept, self._markers(aborted, self.gap_reason), left_out)

    def end(self, reason: str) -> ChunkBatch | None:
        """Markers for all open episodes, if any are: nothing more will come of this source."""
        rows = [row for row in self._open.reshape(-1) if _is_open(row)]
        self._open = np.zeros((0, 1), CHUNK_TABLE)
        return self._markers(rows, reason)

    def _remember(self, batch: ChunkBatch) -> None:
        if self._template is None:
            # New arrays: a view of none of a batch's rows would still keep the whole message in memory.
            columns = {name: np.empty((0, *c.shape[1:]), c.dtype) for name, c in batch.columns.items()}
            empty = np.empty(0, CHUNK_TABLE)
            self._template = replace(
                batch, table=empty, columns=columns, infos={}, seq=0, order=None, connector_update={}
            )

    def _grow(self, envs: int, agents: int) -> None:
        if self._open.shape[0] < envs or self._open.shape[1] < agents:
            shape = (max(self._open.shape[0], envs), max(self._open.shape[1], agents))
            grown = np.zeros(shape, CHUNK_TABLE)
            grown[: self._open.shape[0], : self._open.shape[1]] = self._open
            self._open = grown

    def _continues(self, row: np.void, aborted: list[np.void]) -> bool:
        """Whether a chunk follows on what the learner has; an episode open there that cannot go on is aborted."""
        place, episode = (int(row["env_index"]), int(row["agent"])), _episode(row)
        self._grow(place[0] + 1, place[1] + 1)
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
            aborted.append(_just_before(row))
        return False

    def _markers(self, rows: list[np.void], reason: str) -> ChunkBatch | None:
        """One ABORTED chunk of no steps after each of `rows`; None for none."""
        if not rows or self._template is None:
            return None
        table = np.array(rows, CHUNK_TABLE)
        table["t_start"] += table["length"]
        table["chunk_index"] += 1
        table["length"] = 0
        table["end"] = ChunkEnd.ABORTED
        table["reason"] = 1
        return replace(self._template, table=table, reasons=("", reason))


def _in_order(table: NDArray[np.void]) -> NDArray[np.intp]:
    """Rows in the order in which things happened in each env: a worker writes end markers last, but they end episodes
    of earlier batches, in whose place others have begun since."""
    return np.argsort(table["length"] > 0, kind="stable")


def _episode(row: np.void) -> tuple[int, int]:
    return int(row["id_high"]), int(row["id_low"])


def _is_open(row: np.void) -> bool:
    """The learner has chunks of this episode, and not its end."""
    return bool(row["length"] and row["end"] == ChunkEnd.ONGOING)


def _just_before(row: np.void) -> np.void:
    """As if of a chunk that ends where `row` begins."""
    before = row.copy()
    before["chunk_index"] -= 1
    before["length"] = 0
    return before
