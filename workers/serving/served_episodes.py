"""The table of open episodes, as the sessions of a policy server see it: of one agent, or of several."""

from __future__ import annotations

from typing import Any, Protocol

from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.workers.external.calls import DriverLoop, OnAnswer


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
