"""Episodes that clients cut into chunks by themselves: each gets its own env index, and every one gets an end.

Each open episode, or each agent's part of one, has an env index in the worker's stream, above those of the worker's
own envs. The learner uses it to tell which chunk continues which.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace

import numpy as np

from headrace.schemas.accounts.ledger import Discard
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.chunk import CHUNK_TABLE, ChunkEnd
from headrace.schemas.chunks.open_episodes import stops

_PartId = tuple[int, int, str, str]
"""An agent's part of an episode: the two words of the episode's id, agent, module."""


@dataclass(slots=True)
class _OpenPart:
    """The newest chunk of an open episode, and a batch without chunks that has its columns."""

    row: np.void
    """Its `t_start` is the env step after its last one."""
    template: ChunkBatch


class ShippedEpisodes:
    """The open episodes of all clients that ship chunks. One thread at a time may call.

    `first_place` is the first env index that the worker's own envs do not use. An owner is any key for one client.
    """

    def __init__(self, first_place: int) -> None:
        self._next_place = first_place
        self._free: list[int] = []
        self._owned: dict[object, dict[_PartId, _OpenPart]] = {}

    def take(self, owner: object, batch: ChunkBatch) -> ChunkBatch:
        """Return the batch, of one module, with env indices, as it goes into the stream."""
        owned, template, table = self._owned.setdefault(owner, {}), _empty(batch), batch.table.copy()
        for at, stop in enumerate(stops(table, batch.columns.get("env_t")).tolist()):
            row = table[at]
            id = int(row["id_high"]), int(row["id_low"]), batch.agents[row["agent"]], batch.modules[0]
            known = owned.pop(id, None)
            place = self._new_place() if known is None else int(known.row["env_index"])
            table["env_index"][at] = place
            if row["end"] == ChunkEnd.ONGOING:
                owned[id] = _OpenPart(table[at].copy(), template)
                owned[id].row["t_start"] = stop
            else:
                heapq.heappush(self._free, place)
        return replace(batch, table=table)

    def lost(self, owner: object, reason: Discard) -> list[ChunkBatch]:
        """Forget `owner`. Return end markers for its open episodes, one batch per module."""
        by_module: dict[str, list[tuple[str, _OpenPart]]] = {}
        for (_, _, agent, module), part in self._owned.pop(owner, {}).items():
            by_module.setdefault(module, []).append((agent, part))
        return [self._markers(parts, reason) for parts in by_module.values()]

    def lost_all(self, reason: Discard) -> list[ChunkBatch]:
        """Forget all owners. Return end markers for all open episodes."""
        return [batch for owner in list(self._owned) for batch in self.lost(owner, reason)]

    def _markers(self, parts: list[tuple[str, _OpenPart]], reason: Discard) -> ChunkBatch:
        table = np.array([part.row for _, part in parts], CHUNK_TABLE)
        agents = list(dict.fromkeys(agent for agent, _ in parts))
        table["agent"] = [agents.index(agent) for agent, _ in parts]
        table["chunk_index"] += 1
        table["length"] = table["lookback"] = 0
        table["end"], table["reason"] = ChunkEnd.ABORTED, 1
        for place in table["env_index"].tolist():
            heapq.heappush(self._free, place)
        return replace(parts[-1][1].template, table=table, agents=agents, reasons=("", reason.value))

    def _new_place(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        self._next_place += 1
        return self._next_place - 1


def _empty(batch: ChunkBatch) -> ChunkBatch:
    columns = {name: np.empty((0, *column.shape[1:]), column.dtype) for name, column in batch.columns.items()}
    table = np.empty(0, CHUNK_TABLE)
    return replace(batch, table=table, columns=columns, infos={}, order=None, connector_update={}, task_of=None)
