"""Cuts a module's fragment into its batch: as for one agent, with the agent of every chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.spaces import Spaces
from headrace.workers.agents.episodes import AgentEpisode
from headrace.workers.sampling.cutting import Marker, Stamp, cut
from headrace.workers.sampling.fragment import OpenChunk
from headrace.workers.sampling.seat_fragment import SeatFragment


def cut_seats(
    fragment: SeatFragment,
    chunks: Sequence[OpenChunk],
    markers: Sequence[Marker],
    spaces: Spaces,
    stamp: Stamp,
    module_id: str,
) -> ChunkBatch:
    """Return the batch as `cutting.cut` does, with the agent of each chunk.

    A chunk's `t_start` is the env step of its first row. Its length counts the agent's own steps.
    """
    batch = cut(fragment, chunks, markers, spaces, stamp)
    parts: list[OpenChunk | Marker] = [*chunks, *markers]
    episodes = [cast(AgentEpisode, part.episode) for part in parts]
    names = {name: i for i, name in enumerate(dict.fromkeys(episode.agent for episode in episodes))}
    batch.table["agent"] = [names[episode.agent] for episode in episodes]
    env_t, offsets = batch.columns["env_t"], batch.offsets
    first, last = env_t[offsets[: len(chunks)]], env_t[offsets[1 : len(chunks) + 1] - 1]
    batch.table["t_start"] = [*first.tolist(), *(episode.t_end for episode in episodes[len(chunks) :])]
    for episode, t in zip(episodes, last.tolist(), strict=False):
        episode.t_end = t + 1
    return replace(batch, agents=list(names), modules=(module_id,))
