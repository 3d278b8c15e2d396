"""Multi-agent envs elsewhere that are stepped each in its own time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from headrace.schemas.spaces import Spaces
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.context import EnvContext
from headrace.workers.envs.process.ready import ReadyVector
from headrace.workers.envs.process.vector import ProcessVector
from headrace.workers.envs.remote.vector import RemoteVector
from headrace.workers.multi_agent.elsewhere import AgentsElsewhere
from headrace.workers.multi_agent.env import AgentDict
from headrace.workers.multi_agent.lanes import Gathered
from headrace.workers.multi_agent.outcomes import StepOutcome
from headrace.workers.multi_agent.turns import Turn, turn_of


class ReadyAgents(AgentsElsewhere, ReadyVector):
    """`send` has some lanes step, `take` gives what came of any: see `ReadyDriver`, which this is in rows.

    Which pool they live in, the other base of a subclass says.
    """

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

    def send(self, turn: Turn, actions: list[Any]) -> None:
        """Have the lanes of `turn`, live and not under way, step. Returns at once."""
        for lane, episode, own in turn.of_lanes(actions):
            self._sent_last[lane.index] = own
            self._packing.pack_actions(self._actions, lane.index, own)
            episode.under_way = True
        self.send_actions_of(np.array([lane.index for lane, _ in turn.lanes], np.intp), self._actions)

    def take(self) -> tuple[Turn, StepOutcome]:
        """Who has answered, and what came of it; waits as `ReadyDriver.poll` does. Raises as `step` does."""
        outcome = self.poll()
        assert outcome.lanes is not None, "a ReadyDriver says who has answered"
        turn = turn_of([self.lanes[index] for index in outcome.lanes.tolist()])
        for _, episode in turn.lanes:
            episode.under_way = False
        gathered = Gathered(self._sent_last)
        return turn, self._conclude(turn, self._gather(self._unpacked(turn, outcome, gathered.failures), gathered))


class ReadyProcessAgents(ReadyAgents, ProcessVector):
    """Those of an `EnvProcessPool`."""


class ReadyRemoteAgents(ReadyAgents, RemoteVector):
    """Those of a `RemotePool`."""
