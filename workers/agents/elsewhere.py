"""Multi-agent envs in other processes, or on other hosts: packed there, and here as if they had never been away."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from headrace.schemas.spaces import column_dtype, leaf_shape, leaves
from headrace.workers.agents.env import AgentDict, MultiAgentEnv
from headrace.workers.agents.episodes import MultiAgentEpisode
from headrace.workers.agents.lanes import MultiAgentLanes
from headrace.workers.agents.packing import Packing
from headrace.workers.agents.turns import Turn
from headrace.workers.envs.backend import EnvBackend
from headrace.workers.envs.failures import Failure
from headrace.workers.envs.lane import Episode, Lane
from headrace.workers.envs.placeholder import out_of_reach
from headrace.workers.envs.process.elsewhere import ElsewhereVector
from headrace.workers.envs.process.vector import ProcessVector
from headrace.workers.envs.remote.vector import RemoteVector
from headrace.workers.envs.spaces import to_gym
from headrace.workers.envs.stepping import Outcome


class MultiAgentEnvElsewhere(MultiAgentEnv):
    """Stands for a multi-agent env that lives elsewhere: has its agents and spaces, and cannot be stepped."""

    def __init__(self, index: int, spaces: dict[Any, tuple[Any, Any]]) -> None:
        self.possible_agents = list(spaces)
        self.observation_spaces = {agent: observation for agent, (observation, _) in spaces.items()}
        self.action_spaces = {agent: action for agent, (_, action) in spaces.items()}
        self._index = index

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        raise out_of_reach(self._index)

    def step(self, actions: AgentDict) -> Any:
        raise out_of_reach(self._index)


class AgentsElsewhere(MultiAgentLanes, ElsewhereVector):
    """Lanes of an `EnvBackend` of packed envs. What those see was checked where they are."""

    _episode_kind = MultiAgentEpisode

    def _learn_spaces(self, pool: EnvBackend) -> None:
        super()._learn_spaces(pool)
        self._packing = Packing.of(pool.spaces)
        by_agent = self._packing.by_agent
        gym_spaces = {agent: (to_gym(own.observation), to_gym(own.action)) for agent, own in by_agent.items()}
        self._learn_agents(by_agent, gym_spaces, check_bounds=False)
        self._actions = {
            name: np.zeros((pool.width, *leaf_shape(leaf)), column_dtype(leaf))
            for name, leaf in leaves(pool.spaces.action, "actions")
        }

    def _stand_in(self, index: int) -> Any:
        return MultiAgentEnvElsewhere(index, self.agent_gym_spaces)

    def _answers(
        self, turn: Turn, actions: Sequence[Any], sent: dict[int, AgentDict], failures: list[Failure]
    ) -> Iterator[tuple[Lane, MultiAgentEpisode, Any]]:
        for lane, _, own in turn.of_lanes(actions):
            sent[lane.index] = own
            self._packing.pack_actions(self._actions, lane.index, own)
        self.send_actions(self._actions)
        yield from self._unpacked(turn, self.poll(), failures)

    def _unpacked(
        self, turn: Turn, outcome: Outcome, failures: list[Failure]
    ) -> Iterator[tuple[Lane, MultiAgentEpisode, Any]]:
        """What came of the step of the lanes of `turn`."""
        failures += outcome.failures
        stepped = {failure.lane: failure.stepped for failure in outcome.failures}
        infos, columns = dict(outcome.infos), self.observations.columns
        for lane, episode in turn.lanes:
            if lane.index in stepped:
                episode.t += stepped[lane.index]
            else:
                yield lane, episode, self._packing.unpack_step(columns, lane.index, infos.get(lane.index, {}))

    def _begin(self, lane: Lane, episode: Episode, info: dict[str, Any]) -> None:
        super()._begin(lane, episode, self._packing.unpack_infos(info))

    def take_started(self) -> list[int]:
        """See `Roster`. Who is seen first is seated now, by env, whichever answered first.

        Raises `PolicyMappingError`, and `ConnectorError` for an agent that a connector has no room for.
        """
        started = sorted(set(super().take_started()))
        begun = ((index, self.lanes[index].episode) for index in started)
        columns = self.observations.columns
        self._seat_first(
            (episode, self._packing.unpack_observations(columns, index))
            for index, episode in begun
            if isinstance(episode, MultiAgentEpisode)
        )
        return started


class ProcessAgents(AgentsElsewhere, ProcessVector):
    """Those of an `EnvProcessPool`."""


class RemoteAgents(AgentsElsewhere, RemoteVector):
    """Those of a `RemotePool`."""
