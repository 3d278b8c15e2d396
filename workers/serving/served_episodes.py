"""The table of open episodes, as the sessions of a policy server see it: of one agent, or of several."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.workers.external.agent_episodes import ExternalAgentEpisodes
from headrace.workers.external.calls import DriverLoop, OnAnswer, Row


class ServedEpisodes(Protocol):
    """Open episodes by id. Any thread may call; nothing blocks. A refusal is a `HeadraceError` and changes nothing."""

    driver_loop: DriverLoop | None
    """The loop that the sampler runs while it waits; None: the sampler sleeps."""

    def start(self, episode_id: str | None = None, *, training_enabled: bool = True) -> str:
        """Open an episode."""

    def take_step(
        self,
        episode_id: str,
        news: tuple[Any, ...],
        observation: Any,
        on_answer: OnAnswer,
        *,
        action: Any = None,
        end: ChunkEnd = ChunkEnd.ONGOING,
    ) -> None:
        """Record one step of a client: `news`, the result of the last action as in `AnyStep.news`, and an observation.

        Then the policy acts, unless the client chose an `action` or the episode is over. The caller has checked that
        observation and action are in their spaces. Both are rows, as `read_row` of their codec returns them.
        """

    def abort(self, episode_id: str, reason: str) -> None:
        """End an episode that will never finish."""


class MultiAgentOpenEpisodes:
    """An `ServedEpisodes` of several agents, which messages name by the text of their ids.

    It passes on unknown agents as they are, and the table refuses them.
    """

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
        """Record one step, as `ServedEpisodes` does. `news` is that of an `AgentsStep`, with ids as text."""
        named = tuple(map(self._with_ids, news))
        self._table.take_step(episode_id, named, observation, on_answer, action=action, end=end)

    def _with_ids(self, by_text: Mapping[str, Any]) -> dict[Any, Any]:
        return {self._ids.get(agent, agent): value for agent, value in by_text.items()}
