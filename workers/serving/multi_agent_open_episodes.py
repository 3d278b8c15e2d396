"""The table of open episodes of several agents, for sessions: messages name an agent by the text of its id."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.workers.external.agent_episodes import ExternalAgentEpisodes
from headrace.workers.external.calls import DriverLoop, OnAnswer, Row


class MultiAgentOpenEpisodes:
    """An `OpenEpisodes` of several agents. It passes on unknown agents as they are, and the table refuses them."""

    def __init__(self, table: ExternalAgentEpisodes) -> None:
        self._table = table
        self._ids = {str(agent): agent for agent in table.spaces}
        self.start, self.abort = table.start, table.abort

    @property
    def driver_loop(self) -> DriverLoop | None:
        """The loop that the sampler runs while it waits."""
        return self._table.driver_loop

    @driver_loop.setter
    def driver_loop(self, driver_loop: DriverLoop | None) -> None:
        self._table.driver_loop = driver_loop

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
        """Record one step, as `OpenEpisodes` does. `news` is that of an `AgentsStep`, with ids as text."""
        named = tuple(map(self._with_ids, news))
        self._table.take_step(episode_id, named, observation, on_answer, action=action, end=end)

    def _with_ids(self, by_text: Mapping[str, Any]) -> dict[Any, Any]:
        return {self._ids.get(agent, agent): value for agent, value in by_text.items()}
