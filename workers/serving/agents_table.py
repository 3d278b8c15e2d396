"""The table of open episodes of several agents, as sessions know it: agents of a message are texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.workers.external.agent_episodes import ExternalAgentEpisodes


class AgentsTable:
    """`Episodes` of several agents. An agent that is not known is left as it is, to be refused there."""

    def __init__(self, table: ExternalAgentEpisodes) -> None:
        self._table = table
        self._ids = {str(agent): agent for agent in table.spaces}
        self.start, self.abort, self.retract = table.start, table.abort, table.retract
        self.ask, self.log_action, self.end = table.ask, table.log_action, table.end

    def log_returns(self, episode_id: str, *by_agent: Mapping[str, Any]) -> None:
        """`news` of an `AgentsStep`, in its order."""
        self._table.log_returns(episode_id, *map(self._of_ids, by_agent))

    def _of_ids(self, told: Mapping[str, Any]) -> dict[Any, Any]:
        return {self._ids.get(agent, agent): value for agent, value in told.items()}
