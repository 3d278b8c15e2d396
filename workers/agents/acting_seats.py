"""The seats that act in a poll, by the module that plays them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.workers.agents.env import AgentDict
from headrace.workers.agents.episodes import MultiAgentEpisode, Seat
from headrace.workers.agents.module_seats import ModuleSeats
from headrace.workers.envs.lane import Lane

Rows = NDArray[np.intp]


@dataclass(frozen=True, slots=True, eq=False)
class SeatGroup:
    """The seats of one module in a list of seats: their rows there, and their places in the list (None: all)."""

    module: ModuleSeats
    rows: Rows
    places: Rows | None

    def of(self, values: Sequence[Any]) -> Sequence[Any]:
        """Return the items of `values` that belong to this group. `values` has one item for each seat of the list."""
        return values if self.places is None else [values[i] for i in self.places.tolist()]

    def of_array(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the rows of an array that belong to this group, as `of` does."""
        return values if self.places is None else values[self.places]


@dataclass(frozen=True, slots=True, eq=False)
class ActingSeats:
    """The seats that act, lane by lane. `turns`: the `turn` of each lane's episode."""

    lanes: list[tuple[Lane, MultiAgentEpisode]]
    turns: list[int]
    seats: list[Seat]
    groups: list[SeatGroup]

    def env_t(self) -> NDArray[np.int64]:
        """Return the env step of each of `seats`, before their envs are stepped."""
        return np.array([episode.t for _, episode in self.lanes for _ in episode.acting], np.int64)

    def by_lane(self, actions: Sequence[Any]) -> dict[int, AgentDict]:
        """Return lane index -> the actions of its agents, from `actions`, one for each of `seats`."""
        start, by_lane = 0, {}
        for lane, episode in self.lanes:
            stop = start + len(episode.agents)
            by_lane[lane.index] = dict(zip(episode.agents, actions[start:stop], strict=True))
            start = stop
        return by_lane


def acting_seats(lanes: Sequence[Lane], newest: ActingSeats | None = None) -> ActingSeats:
    """Return the seats with an observation to act on. An env without such a seat is stepped too.

    Returns `newest` if the episodes of the lanes and their turns are still the same.
    """
    pairs = [(lane, lane.episode) for lane in lanes if isinstance(lane.episode, MultiAgentEpisode)]
    turns = [episode.turn for _, episode in pairs]
    if newest is not None and turns == newest.turns and pairs == newest.lanes:
        return newest
    seats = [seat for _, episode in pairs for seat in episode.acting]
    return ActingSeats(pairs, turns, seats, seat_groups(seats))


def seat_groups(seats: Sequence[Seat]) -> list[SeatGroup]:
    """Return `seats` by module, in the order of the modules' numbers."""
    if not seats:
        return []
    rows = np.array([seat.row for seat in seats], np.intp)
    owners = [seat.module.index for seat in seats]
    first = owners[0]
    if owners.count(first) == len(owners):
        return [SeatGroup(seats[0].module, rows, None)]
    owner = np.array(owners)
    numbers, examples = np.unique(owner, return_index=True)
    groups = []
    for number, example in zip(numbers.tolist(), examples.tolist(), strict=True):
        places = np.flatnonzero(owner == number)
        groups.append(SeatGroup(seats[example].module, rows[places], places))
    return groups
