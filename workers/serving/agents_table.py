"""The table of open episodes of several agents, as sessions know it: agents of a message are texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.schemas.chunk import ChunkEnd
from headrace.workers.external.agent_episodes import ExternalAgentEpisodes
from headrace.workers.external.calls import OnAnswer, Row, Turns


class AgentsTable:
    """`Episodes` of several agents. An agent that is not known is left as it is, to be refused there."""

    def __init__(self, table: ExternalAgentEpisodes) -> None:
        self._table = table
        self._ids = {str(agent): agent for agent in table.spaces}
        self.start, self.abort = table.start, table.abort

    @property
    def turns(self) -> Turns | None:
        """See `Episodes`."""
        return self._table.turns

    @turns.setter
    def turns(self, turns: Turns | None) -> None:
        self._table.turns = turns

    def take_step(
        self,
        episode_id: str,
        news: tuple[Mapping[str, Any], ...],
        observation: Mapping[Any, Row],
        on_answer: OnAnswer,
        *,
        action: Mapping[Any, Row] | None = None,
        end: ChunkEnd = ChunkEnd.ONGOING,
    ) -> None:
        """See `Episodes`; `news` of an `AgentsStep`."""
        named = tuple(map(self._of_ids, news))
        self._table.take_step(episode_id, named, observation, on_answer, action=action, end=end)

    def _of_ids(self, told: Mapping[str, Any]) -> dict[Any, Any]:
        return {self._ids.get(agent, agent): value for agent, value in told.items()}
