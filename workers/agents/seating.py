"""Seats and agents: the seats of agents in all envs, the modules that play them, and their observations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from headrace.schemas.chunks.chunk import format_episode_id
from headrace.schemas.chunks.spaces import Spaces
from headrace.workers.agents.acting_seats import seat_groups
from headrace.workers.agents.env import AgentDict
from headrace.workers.agents.episodes import AgentEpisode, MultiAgentEpisode, Seat
from headrace.workers.agents.module_seats import ModuleSeats
from headrace.workers.envs.observations import NoteOutside
from headrace.workers.policy.policies import NO_EPISODE, Policies, PolicyMappingError
from headrace.workers.randomness.seeds import SeedTree


class Seating:
    """The seats of `num_envs` envs. `policies` map agents to modules; `modules` hold the seats' observations.

    `id_high`: the upper half of episode ids, which the policies' mapping gets.
    """

    def __init__(self, policies: Policies, num_envs: int, seeds: SeedTree, id_high: int) -> None:
        self.policies = policies
        self._num_envs = num_envs
        self._seeds = seeds
        self._id_high = id_high

    def learn(
        self,
        spaces: Mapping[Any, Spaces],
        gym_spaces: Mapping[Any, tuple[Any, Any]],
        *,
        check_bounds: bool,
        makes_rows: bool,
        note_outside: NoteOutside | None = None,
    ) -> None:
        """Take over the agents of newly built envs, and make a module without seats for each policy.

        `makes_rows`: add each agent's rows now, if the mapping knows the agent's module before any episode. Otherwise,
        where each env has its own pace, the width and rounding of a pass would depend on which env is first.
        """
        self.agents: dict[Any, int] = {agent: i for i, agent in enumerate(spaces)}
        self.agent_spaces, self.agent_gym_spaces = dict(spaces), dict(gym_spaces)
        self.modules = {
            module_id: ModuleSeats(
                module_id,
                index,
                self.policies.specs[module_id],
                own,
                self._num_envs,
                self._seeds,
                check_bounds=check_bounds,
                note_outside=note_outside,
            )
            for index, (module_id, own) in enumerate(self.policies.spaces(self.agent_spaces).items())
        }
        self._may_play = {
            agent: {module_id for module_id, module in self.modules.items() if module.env_spaces == own}
            for agent, own in self.agent_spaces.items()
        }
        for agent, index in self.agents.items() if makes_rows else ():
            with suppress(PolicyMappingError):
                module_id = self.policies.module_of(agent, NO_EPISODE)
                if module_id in self._may_play[agent]:
                    self.modules[module_id].row_of(0, index)

    def seat(self, whole: MultiAgentEpisode, agent: Any) -> Seat:
        """Return the agent's seat in an episode in which it appears for the first time.

        Raises `PolicyMappingError`, and `ConnectorError` for an agent that a connector has no room for.
        """
        episode_id = format_episode_id(self._id_high, whole.id_low)
        module = self.modules[self.policies.module_of(agent, episode_id)]
        if module.module_id not in self._may_play[agent]:
            built_for = f"was mapped to {module.module_id!r}, which was built for other spaces"
            seen = f"{built_for}, {module.env_spaces!r:.200} and not {self.agent_spaces[agent]!r:.200}"
            raise PolicyMappingError(agent, seen, self.policies.specs)
        ids, start = (whole.env_index, whole.number, whole.seed), whole.started_at
        episode = AgentEpisode(*ids, {}, start, trains=whole.trains, task=whole.task, agent=str(agent), whole=whole)
        return Seat(agent, module, module.row_of(whole.env_index, self.agents[agent]), episode)

    def seat_first(self, begun: Iterable[tuple[MultiAgentEpisode, AgentDict]]) -> dict[int, Exception]:
        """Seat the agents that are observed first in each of the new episodes, and write their observations.

        Return lane -> the error of a bad observation. Raises as `seat` does.
        """
        seats: list[Seat] = []
        seen: list[Any] = []
        for episode, first in begun:
            episode.let_act([self.seat(episode, agent) for agent in first])
            episode.seats = {seat.agent: seat for seat in episode.acting}
            seats += episode.acting
            seen += first.values()
        return self.show(seats, seen)

    def show(self, seats: Sequence[Seat], observations: Sequence[Any]) -> dict[int, Exception]:
        """Write the observations of the seats. Return lane -> the error of a bad observation."""
        bad: dict[int, Exception] = {}
        for group in seat_groups(seats):
            for place, error in group.module.observations.put(group.rows, group.of(observations)):
                bad.setdefault(group.of(seats)[place].episode.env_index, error)
        return bad

    def blank(self, lane: int) -> None:
        """Clear the modules' observations of the env in `lane`, because it is closed."""
        for module in self.modules.values():
            module.blank(lane)
