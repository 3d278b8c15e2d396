"""One batch for each module, and all of them read as one sequence of chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import overload

import numpy as np

from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.chunk import ChunkEnd, EpisodeChunk

_LAST = {ChunkEnd.ONGOING: 1, ChunkEnd.ABORTED: 2}


class ModuleBatches(Sequence[EpisodeChunk]):
    """The result of one cut: iterates over the chunks of all modules, finished agents first, end markers last.

    `batches`: module id -> its `ChunkBatch`, with columns of its own spaces. A module is absent if no agent was ever
    mapped to it.
    """

    def __init__(self, batches: Mapping[str, ChunkBatch]) -> None:
        self.batches = dict(batches)

    @cached_property
    def _places(self) -> list[tuple[ChunkBatch, int]]:
        """Batch and index of each chunk, in order.

        Computed on first access, because a worker that only ships batches never needs it.
        """
        places = []
        for batch in self.batches.values():
            places += [(_LAST.get(end, 0), batch, i) for i, end in enumerate(batch.table["end"].tolist())]
        return [(batch, i) for _, batch, i in sorted(places, key=lambda place: place[0])]

    @property
    def steps(self) -> int:
        """Agent steps in all chunks together."""
        return sum(batch.steps for batch in self.batches.values())

    def __len__(self) -> int:
        return sum(map(len, self.batches.values()))

    @overload
    def __getitem__(self, index: int) -> EpisodeChunk: ...
    @overload
    def __getitem__(self, index: slice) -> list[EpisodeChunk]: ...
    def __getitem__(self, index: int | slice) -> EpisodeChunk | list[EpisodeChunk]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        batch, place = self._places[index]
        return batch[place]

    def agent_steps(self) -> dict[str, int]:
        """Return the number of steps by agent."""
        steps: dict[str, int] = {}
        for batch in self.batches.values():
            sums = np.bincount(batch.table["agent"], batch.table["length"], len(batch.agents))
            for agent, count in zip(batch.agents, sums.tolist(), strict=True):
                steps[agent] = steps.get(agent, 0) + int(count)
        return steps


Cut = ChunkBatch | ModuleBatches
"""A cut of a runner with one agent or several."""


def batches_of(cut: Cut) -> list[ChunkBatch]:
    """Return the batches of a cut that have chunks."""
    batches = [cut] if isinstance(cut, ChunkBatch) else list(cut.batches.values())
    return [batch for batch in batches if len(batch)]
