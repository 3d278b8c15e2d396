"""The table of open episodes of several agents, as sessions know it: agents of a message are texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headrace.schemas.chunk import ChunkEnd
from headrace.schemas.errors import HeadraceError
from headrace.workers.external.agent_episodes import ExternalAgentEpisodes
from headrace.workers.external.calls import OnAnswer


class AgentsTable:
    """`Episodes` of several agents. An agent that is not known is left as it is, to be refused there."""

    def __init__(self, table: ExternalAgentEpisodes) -> None:
        self._table = table
        self._ids = {str(agent): agent for agent in table.spaces}
        self.start, self.abort = table.start, table.abort

    @property
    def meanwhile(self) -> Callable[[float], None] | None:
        """See `Episodes`."""
        return self._table.meanwhile

    @meanwhile.setter
    def meanwhile(self, turn: Callable[[float], None] | None) -> None:
        self._table.meanwhile = turn

    def take_step(
        self,
        episode_id: str,
        news: tuple[Mapping[str, Any], ...],
        observation: Mapping[Any, Any],
        on_answer: OnAnswer,
        *,
        action: Mapping[Any, Any] | None = None,
        end: ChunkEnd = ChunkEnd.ONGOING,
    ) -> None:
        """See `Episodes`; `news` of an `AgentsStep`."""
        table = self._table
        try:
            if news:
                table.log_returns(episode_id, *map(self._of_ids, news))
            if end is not ChunkEnd.ONGOING:
                table.end(episode_id, observation, on_answer, truncated=end is ChunkEnd.TRUNCATED)
            elif action is not None:
                table.log_action(episode_id, observation, action, on_answer)
            else:
                table.ask(episode_id, observation, on_answer)
        except HeadraceError:
            table.retract(episode_id)
            raise

    def _of_ids(self, told: Mapping[str, Any]) -> dict[Any, Any]:
        return {self._ids.get(agent, agent): value for agent, value in told.items()}
