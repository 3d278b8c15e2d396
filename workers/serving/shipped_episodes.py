"""Episodes that clients cut into chunks by themselves: chunks must have no gaps, and every episode gets an end.

Each open episode, or each agent's part of one, has its own env index in the worker's stream, above those of the
worker's own envs. The learner uses it to tell which chunk continues which. A batch is checked as a whole
before any of it is kept.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.accounts.ledger import Discard
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.chunk import CHUNK_TABLE, ChunkEnd
from headrace.schemas.errors.serving import ServingError

MOST_OPEN = 4096
"""The most open episodes of all clients together."""

_PartId = tuple[int, int, str, str]
"""An agent's part of an episode: the two words of the episode's id, agent, module."""


@dataclass(frozen=True, slots=True)
class _ShippedChunk:
    """A chunk or end marker of `id`. `t_end` is the env step after its last one."""

    id: _PartId
    row: np.void
    t_end: int
    pauses: bool
    """True if the agent may skip env steps, so that its own steps have their own count."""

    def check_follows(self, last: _ShippedChunk | None) -> None:
        """Raise `ServingError` unless this chunk continues `last`, or begins the episode if `last` is None."""
        chunk, begins = int(self.row["chunk_index"]), int(self.row["t_start"])
        length, steps = int(self.row["length"]), int(self.row["episode_length"])
        due, t, before = (0, 0, 0) if last is None else last.next_due
        in_time = begins >= t if self.pauses else begins == t
        if chunk != due or not in_time or steps != before + length:
            raise ServingError(
                f"chunk {chunk} of episode {self.id[0]:016x}{self.id[1]:016x} begins at step {begins} and ends at "
                f"{steps}; after what was shipped before, chunk {due} from step {t} on is due",
                "bad_request",
            )

    @property
    def next_due(self) -> tuple[int, int, int]:
        """The next chunk's number, its first possible env step, and the agent's steps before it."""
        return int(self.row["chunk_index"]) + 1, self.t_end, int(self.row["episode_length"])


@dataclass(slots=True)
class _OwnerState:
    """One client's open episodes: the newest chunk of each, and an empty batch with each module's columns."""

    newest: dict[_PartId, _ShippedChunk] = field(default_factory=dict)
    templates: dict[str, ChunkBatch] = field(default_factory=dict)


class ShippedEpisodes:
    """The open episodes of all clients that ship chunks. One thread at a time may call.

    `first_place` is the first env index that the worker's own envs do not use. An owner is any key for one client.
    """

    def __init__(self, first_place: int) -> None:
        self._next_place = first_place
        self._free: list[int] = []
        self._owned: dict[object, _OwnerState] = {}
        self._open: dict[_PartId, int] = {}
        """The env index of each open episode."""

    def __len__(self) -> int:
        return len(self._open)

    def take(self, owner: object, batch: ChunkBatch) -> ChunkBatch:
        """Return the batch with env indices, as it goes into the stream.

        Raises `ServingError` for chunks that do not continue the owner's episodes, and `ServingError` beyond
        `MOST_OPEN`. Then nothing of the batch is kept.
        """
        owned = self._owned.get(owner, _OwnerState())
        newest, parts = dict(owned.newest), _chunks_of(batch)
        for part in parts:
            self._check(part, newest)
        if len(self._open) + len(newest) - len(owned.newest) > MOST_OPEN:
            raise ServingError(
                f"{len(self._open)} episodes of clients are open, and the limit is {MOST_OPEN}", "server_full"
            )
        table = batch.table.copy()
        table["env_index"] = [self._place(part.id, part.row) for part in parts]
        owned.newest, owned.templates[batch.modules[0]] = newest, _empty(batch)
        self._owned[owner] = owned
        return replace(batch, table=table)

    def lost(self, owner: object, reason: Discard) -> list[ChunkBatch]:
        """Forget `owner`. Return end markers for its open episodes, one batch per module."""
        owned = self._owned.pop(owner, _OwnerState())
        by_module: dict[str, list[_ShippedChunk]] = {}
        for part in owned.newest.values():
            by_module.setdefault(part.id[-1], []).append(part)
        return [self._markers(owned.templates[module], parts, reason) for module, parts in by_module.items()]

    def _markers(self, template: ChunkBatch, parts: list[_ShippedChunk], reason: Discard) -> ChunkBatch:
        table = np.array([part.row for part in parts], CHUNK_TABLE)
        agents = list(dict.fromkeys(part.id[2] for part in parts))
        table["agent"] = [agents.index(part.id[2]) for part in parts]
        table["t_start"] = [part.t_end for part in parts]
        table["chunk_index"] += 1
        table["length"] = table["lookback"] = 0
        table["end"], table["reason"] = ChunkEnd.ABORTED, 1
        table["env_index"] = [self._place(part.id, row) for part, row in zip(parts, table, strict=True)]
        return replace(template, table=table, agents=agents, reasons=("", reason.value))

    def lost_all(self, reason: Discard) -> list[ChunkBatch]:
        """Forget all owners. Return end markers for all open episodes."""
        return [batch for owner in list(self._owned) for batch in self.lost(owner, reason)]

    def _check(self, part: _ShippedChunk, newest: dict[_PartId, _ShippedChunk]) -> None:
        last = newest.get(part.id)
        part.check_follows(last)
        if last is None and (part.id in self._open or not part.row["length"]):
            raise ServingError(
                f"episode {part.id[0]:016x}{part.id[1]:016x} is another client's, or never began", "bad_request"
            )
        if part.row["end"] == ChunkEnd.ONGOING:
            newest[part.id] = part
        else:
            newest.pop(part.id, None)

    def _place(self, id: _PartId, row: np.void) -> int:
        """Return the env index of a row's episode. If the row ends the episode, the index is free again."""
        place = self._open.pop(id, None)
        if place is None:
            place = heapq.heappop(self._free) if self._free else self._next_place
            self._next_place = max(self._next_place, place + 1)
        if row["end"] == ChunkEnd.ONGOING:
            self._open[id] = place
        else:
            heapq.heappush(self._free, place)
        return place


def _chunks_of(batch: ChunkBatch) -> list[_ShippedChunk]:
    env_t, offsets = batch.columns.get("env_t"), batch.offsets.tolist()
    parts = []
    for row, start, stop in zip(batch.table, offsets[:-1], offsets[1:], strict=True):
        id = int(row["id_high"]), int(row["id_low"]), batch.agents[row["agent"]], batch.modules[row["module"]]
        t_end = int(row["t_start"]) + stop - start
        if env_t is not None and stop > start:
            t_end = _last(env_t[start:stop], int(row["t_start"])) + 1
        parts.append(_ShippedChunk(id, row.copy(), t_end, pauses=env_t is not None))
    return parts


def _last(env_t: NDArray[Any], t_start: int) -> int:
    """Return the last env step of a chunk. Raises `ServingError` unless its env steps rise from `t_start`."""
    first, last = int(env_t[0]), int(env_t[-1])
    if first != t_start or last >= 1 << 62 or bool((env_t[1:] <= env_t[:-1]).any()):
        raise ServingError(
            f"env_t of a chunk goes from {first} to {last}; it should rise from its start, {t_start}", "bad_request"
        )
    return last


def _empty(batch: ChunkBatch) -> ChunkBatch:
    columns: dict[str, NDArray[np.generic]] = {
        name: np.empty((0, *column.shape[1:]), column.dtype) for name, column in batch.columns.items()
    }
    table = np.empty(0, CHUNK_TABLE)
    return replace(batch, table=table, columns=columns, infos={}, order=None, connector_update={})
