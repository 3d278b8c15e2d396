"""Multi-agent envs in other processes or on other hosts. They are packed there, and unpacked here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from headrace.schemas.chunks.gymnasium_spaces import to_gym
from headrace.schemas.chunks.spaces import column_dtype, leaf_shape, leaves
from headrace.workers.agents.acting_seats import ActingSeats
from headrace.workers.agents.env import AgentDict
from headrace.workers.agents.episodes import MultiAgentEpisode
from headrace.workers.agents.packing import Packing
from headrace.workers.agents.seating import Seating
from headrace.workers.agents.vector import Gathered, LaneAnswer
from headrace.workers.envs.backend import EnvBackend, EnvPlaceholder
from headrace.workers.envs.driver import Pace
from headrace.workers.envs.lane import Lane
from headrace.workers.envs.lane_table import LaneTable
from headrace.workers.envs.sequential_step import Outcome
from headrace.workers.envs.vector import EnvVector, OpenBackend


class MultiAgentEnvPlaceholder(EnvPlaceholder):
    """A placeholder of a multi-agent env in another process. It has the agents and their spaces."""

    def __init__(self, index: int, spaces: Mapping[Any, tuple[Any, Any]]) -> None:
        self.possible_agents = list(spaces)
        self.observation_spaces = {agent: observation for agent, (observation, _) in spaces.items()}
        self.action_spaces = {agent: action for agent, (_, action) in spaces.items()}
        self._index = index


class PackedAgents(EnvVector):
    """An `AgentSource` of packed envs, whose observations are checked where the envs are."""

    _episode_kind = MultiAgentEpisode

    def __init__(self, table: LaneTable, open_backend: OpenBackend, pace: Pace, seating: Seating) -> None:
        self._seating = seating
        super().__init__(table, open_backend, pace)

    def _learn(self, backend: EnvBackend) -> None:
        super()._learn(backend)
        self._packing = Packing.of(backend.spaces)
        by_agent = self._packing.by_agent
        gym_spaces = {agent: (to_gym(own.observation), to_gym(own.action)) for agent, own in by_agent.items()}
        self._seating.learn(by_agent, gym_spaces, check_bounds=False, makes_rows=self.pace is Pace.READY)
        self._actions = {
            name: np.zeros((backend.width, *leaf_shape(leaf)), column_dtype(leaf))
            for name, leaf in leaves(backend.spaces.action, "actions")
        }

    def _env_at(self, index: int) -> Any:
        env = super()._env_at(index)
        return None if env is None else MultiAgentEnvPlaceholder(index, self._seating.agent_gym_spaces)

    def _take_down(self, lane: Lane) -> None:
        super()._take_down(lane)
        self._seating.blank(lane.index)

    def take_started(self) -> list[int]:
        """Return the lanes that began an episode, by index, in whatever order they replied. Give their agents seats.

        Raises as `Seating.seat` does.
        """
        lanes = sorted(set(super().take_started()))
        columns = self.observations.columns
        begun = []
        for index in lanes:
            episode = self.lanes[index].episode
            if isinstance(episode, MultiAgentEpisode):
                episode.reset_info = self._packing.unpack_infos(episode.reset_info)
                begun.append((episode, self._packing.unpack_observations(columns, index)))
        self._seating.seat_first(begun)
        return lanes

    def send(self, actions: Mapping[int, AgentDict]) -> None:
        """Step lanes, by index, with the actions of their agents."""
        for index, own in actions.items():
            self._packing.pack_actions(self._actions, index, own)
        in_step = self.pace is Pace.LOCK_STEP
        self.send_actions(self._actions, None if in_step else np.array(list(actions), np.intp))

    def answers(self, acting: ActingSeats, outcome: Outcome, gathered: Gathered) -> Iterator[LaneAnswer]:
        """Yield the unpacked reply of each lane of `acting`. Add failures of envs to `gathered` first."""
        gathered.failures += outcome.failures
        stepped = {failure.lane: failure.stepped for failure in outcome.failures}
        infos, columns = dict(outcome.infos), self.observations.columns
        for lane, episode in acting.lanes:
            if lane.index in stepped:
                episode.t += stepped[lane.index]
            else:
                yield lane, episode, self._packing.unpack_step(columns, lane.index, infos.get(lane.index, {}))
