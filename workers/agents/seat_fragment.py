"""The buffers of one module's seats, their cut, and the steps that are discarded from them.

An action's step is complete when its agent observes again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.accounts.ledger import Discard
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.spaces import Spaces
from headrace.workers.agents.episodes import AgentEpisode, MultiAgentEpisode, Seat
from headrace.workers.envs.lane import Episode
from headrace.workers.sampling.cutting import Marker, Stamp, cut
from headrace.workers.sampling.episode_view import OpenRows
from headrace.workers.sampling.fragment import Fragment, OpenChunk, Rows


class SeatFragment(Fragment):
    """A `Fragment` whose lanes are seats."""

    def __init__(self, width: int, capacity: int, observations: Mapping[str, NDArray[Any]]) -> None:
        super().__init__(width, capacity, observations)
        self._add("env_t", np.empty(0, np.int64))

    def widen(self, observations: Mapping[str, NDArray[Any]]) -> None:
        """Make room for more seats after the existing ones; `observations` are the wider columns."""
        old, self.width = self.width, len(next(iter(observations.values())))
        self._observations = observations
        for name, column in self.columns.items():
            wider = np.empty((self.width, *column.shape[1:]), column.dtype)
            wider[:old] = column
            self.columns[name] = wider
        self._seq = None
        self.open += [None] * (self.width - old)
        cursor = np.zeros(self.width, np.intp)
        cursor[:old] = self._cursor
        self._cursor = cursor

    def act_at(
        self, rows: Rows, columns: Mapping[str, NDArray[Any]], weights_seq: int, env_t: NDArray[np.int64]
    ) -> None:
        """Write observations and actions of the seats `rows`, with their env steps `env_t`, one for each of them."""
        self.aim(rows)
        self.put(columns, weights_seq)
        self.columns["env_t"][self._at(rows)] = env_t

    def rows_of(self, row: int, episode: Episode, *, pending: bool) -> OpenRows | None:
        """Return the open rows of a seat's `episode`, for callbacks; None if it has none."""
        chunk = self.open[row]
        if chunk is None or chunk.episode is not episode:
            chunk = next((chunk for chunk in reversed(self.ended) if chunk.episode is episode), None)
        if chunk is None:
            return None
        stop = self._stop(chunk)
        return OpenRows(self.columns, self._observations, chunk.infos, row, chunk.start, stop, pending)


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
    env_t, offsets = batch.arrays["env_t"], batch.offsets
    first, last = env_t[offsets[: len(chunks)]], env_t[offsets[1 : len(chunks) + 1] - 1]
    batch.table["t_start"] = [*first.tolist(), *(episode.t_end for episode in episodes[len(chunks) :])]
    for episode, t in zip(episodes, last.tolist(), strict=False):
        episode.t_end = t + 1
    return replace(batch, agents=list(names), modules=(module_id,))


@dataclass(slots=True)
class LostRewards:
    """Rewards that belong to no step, and counts of missing final observations, since the runner was built."""

    agents: int = 0
    """Number of agents that got rewards and never acted, or whose last step was dropped."""
    total: float = 0.0
    """Sum of these rewards."""
    final_observations_repeated: int = 0
    final_steps_dropped: int = 0

    def add(self, reward: float) -> None:
        """Count the rewards of an agent that have no step to belong to."""
        if reward:
            self.agents += 1
            self.total += reward


def lose_episode(
    episode: MultiAgentEpisode,
    reason: Discard,
    fragments: Mapping[str, SeatFragment],
    markers: Mapping[str, list[Marker]],
    unrecorded: Sequence[Seat] = (),
) -> int:
    """Discard all open chunks of the episode, with a marker for each part already delivered. Return the steps lost.

    The lost steps are those in rows and the pending ones. Steps of the seats `unrecorded`, which acted in the failing
    poll, do not count. Steps of agents that were done before are still delivered.
    """
    acting = set(map(id, unrecorded))
    lost = 0
    for seat in episode.seats.values():
        fragment = fragments.get(seat.module.module_id)
        rows = fragment.abort(seat.row) if fragment is not None else None
        if seat.done and rows is None:
            continue
        if seat.episode.chunks:
            markers[seat.module.module_id].append(Marker(seat.episode, reason))
        lost += (rows[1] if rows is not None else 0) + (seat.pending and id(seat) not in acting)
    return lost


def lose_ended(
    fragment: SeatFragment, goes_on: Callable[[OpenChunk], bool], reason: Discard, markers: list[Marker]
) -> int:
    """Discard the chunks of agents that are done in episodes that continue. Return the number of steps in them."""
    lost = [chunk for chunk in fragment.ended if goes_on(chunk)]
    gone = set(map(id, lost))
    fragment.ended = [chunk for chunk in fragment.ended if id(chunk) not in gone]
    markers += [Marker(chunk.episode, reason) for chunk in lost if chunk.episode.chunks]
    return sum(chunk.stop - chunk.start for chunk in lost)
