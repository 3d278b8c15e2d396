"""What becomes part of no chunk: steps that are lost by name, and rewards that no step could take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.schemas.ledger import Discard
from headrace.workers.agents.episodes import MultiAgentEpisode, Seat
from headrace.workers.policy.module_seats import ModuleSeats
from headrace.workers.sampling.cutting import Marker
from headrace.workers.sampling.fragment import OpenChunk


@dataclass(slots=True)
class LossCounts:
    """What envs gave that could not become part of any step, and what was made up, since the runner was built."""

    rewards: int = 0
    """Agents that got something and never acted, or whose last step was dropped."""
    return_: float = 0.0
    """The sum of what they got."""
    final_observations_repeated: int = 0
    final_steps_dropped: int = 0

    def lose(self, reward: float) -> None:
        """An agent's rewards have no step to belong to."""
        if reward:
            self.rewards += 1
            self.return_ += reward


def lose_episode(episode: MultiAgentEpisode, reason: Discard, unrecorded: Sequence[Seat] = ()) -> int:
    """Forget all open chunks of the episode, and tell the learner if it knows a part; gives the steps lost with them.

    That is the steps in rows and those that hang; not those of the seats `unrecorded`, who acted in the poll that goes
    wrong. What agents that were done before had is delivered all the same.
    """
    acting = set(map(id, unrecorded))
    lost = 0
    for seat in episode.seats.values():
        fragment = seat.module.fragment
        rows = fragment.abort(seat.row) if fragment is not None else None
        if seat.done and rows is None:
            continue
        if seat.episode.chunks:
            seat.module.markers.append(Marker(seat.episode, reason))
        lost += (rows[1] if rows is not None else 0) + (seat.hangs and id(seat) not in acting)
    return lost


def lose_ended(module: ModuleSeats, goes_on: Callable[[OpenChunk], bool], reason: Discard) -> int:
    """Forget the chunks of agents that were done in episodes that go on; gives the steps in them."""
    if module.fragment is None:
        return 0
    lost = [chunk for chunk in module.fragment.ended if goes_on(chunk)]
    gone = set(map(id, lost))
    module.fragment.ended = [chunk for chunk in module.fragment.ended if id(chunk) not in gone]
    module.markers += [Marker(chunk.episode, reason) for chunk in lost if chunk.episode.chunks]
    return sum(chunk.stop - chunk.start for chunk in lost)
