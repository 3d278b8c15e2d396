"""Multi-agent envs elsewhere that are stepped each in its own time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from headrace.schemas.spaces import Spaces
from headrace.workers.agents.elsewhere import AgentsElsewhere
from headrace.workers.agents.env import AgentDict
from headrace.workers.agents.episodes import MultiAgentEpisode
from headrace.workers.agents.lanes import Gathered
from headrace.workers.agents.ready_seats import ReadySeats
from headrace.workers.agents.turns import Turn
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.context import EnvContext
from headrace.workers.envs.lane import Lane
from headrace.workers.envs.process.ready import ReadyVector
from headrace.workers.envs.process.vector import ProcessVector
from headrace.workers.envs.remote.vector import RemoteVector
from headrace.workers.envs.stepping import Outcome


class ReadyAgents(AgentsElsewhere, ReadyVector, ReadySeats):
    """`ReadySeats` of packed envs. Which pool they live in, the other base of a subclass says."""

    def build(self, config: EnvRunnerConfig, first: tuple[Any, EnvContext] | None = None) -> None:
        """See `Roster`."""
        self._sent_last: dict[int, AgentDict] = {}
        """By lane."""
        super().build(config, first)

    def _learn_agents(
        self, spaces: Mapping[Any, Spaces], gym_spaces: Mapping[Any, tuple[Any, Any]], *, check_bounds: bool
    ) -> None:
        super()._learn_agents(spaces, gym_spaces, check_bounds=check_bounds)
        self._make_rows()

    def _send(self, actions: Mapping[int, AgentDict]) -> None:
        self._sent_last |= actions
        for index, own in actions.items():
            self._packing.pack_actions(self._actions, index, own)
        self.send_actions_of(np.array(list(actions), np.intp), self._actions)

    def _told(self, turn: Turn, outcome: Outcome, gathered: Gathered) -> Iterator[tuple[Lane, MultiAgentEpisode, Any]]:
        gathered.sent = self._sent_last
        return self._unpacked(turn, outcome, gathered.failures)


class ReadyProcessAgents(ReadyAgents, ProcessVector):
    """Those of an `EnvProcessPool`."""


class ReadyRemoteAgents(ReadyAgents, RemoteVector):
    """Those of a `RemotePool`."""
