"""Whole episodes of a recording, joined of chunks that lie among those of other workers and envs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.chunk import ChunkEnd, EpisodeChunk, to_episode
from headrace.schemas.chunks.spaces import Leaf, column_dtype, leaf_shape
from headrace.schemas.errors import ChunkError


class WholeEpisodes:
    """The episodes of one module that have all their steps, each as one chunk, in the order in which they end.

    Memory holds the steps of the open episodes, and of the one that is yielded.

    - taken, steps: number of episodes yielded, and of their steps.
    - left_out: number of agents' episodes that were not, by reason. It is complete after the last episode.
    """

    def __init__(self, batches: Iterable[ChunkBatch], module_id: str) -> None:
        self._batches, self._module_id = batches, module_id
        self.taken = self.steps = 0
        self.left_out: Counter[str] = Counter()

    def __iter__(self) -> Iterator[EpisodeChunk]:
        parts: dict[tuple[str, str], list[EpisodeChunk]] = {}
        for batch in self._batches:
            if batch.modules[0] != self._module_id:
                continue
            for chunk in batch:
                key = chunk.episode_id, chunk.agent_id
                own = parts.setdefault(key, [])
                if chunk.end is ChunkEnd.ONGOING:
                    # A copy: a view would keep all steps of its file in memory.
                    own.append(to_episode([replace(chunk, state_in={}, lookback=None)]))
                else:
                    del parts[key]
                    yield from self._whole([*own, chunk])
        self.left_out["not ended"] += len(parts)

    def _whole(self, parts: list[EpisodeChunk]) -> Iterator[EpisodeChunk]:
        try:
            episode = to_episode(parts)
        except ChunkError:
            self.left_out["with steps missing"] += 1
            return
        if episode.end is ChunkEnd.ABORTED:
            self.left_out["aborted"] += 1
        elif episode.episode_length != len(episode):
            self.left_out["with steps missing"] += 1
        else:
            self.taken += 1
            self.steps += len(episode)
            yield episode

    def in_words(self) -> str:
        """Return what was taken and what was left out."""
        left_out = [f"{count:,} {reason}" for reason, count in sorted(self.left_out.items()) if count]
        rest = f"; left out: {', '.join(left_out)}" if left_out else ""
        return f"{self.taken:,} episodes of {self.steps:,} steps{rest}"


def is_picture(leaf: Leaf) -> bool:
    """Return whether rows of the leaf are pictures: RGB bytes."""
    shape = leaf_shape(leaf)
    return column_dtype(leaf) == np.uint8 and 0 not in shape and len(shape) == 3 and shape[2] == 3
