"""Steps that are in no chunk because they were discarded, and rewards that belong to no step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from headrace.schemas.accounts.ledger import Discard
from headrace.workers.agents.episodes import MultiAgentEpisode, Seat
from headrace.workers.agents.seat_fragment import SeatFragment
from headrace.workers.sampling.cutting import Marker
from headrace.workers.sampling.fragment import OpenChunk


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
