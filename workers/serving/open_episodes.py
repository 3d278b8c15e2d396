"""What a policy server needs of the table of open episodes that stands between it and the sampler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from headrace.schemas.chunk import ChunkEnd
from headrace.schemas.errors import HeadraceError
from headrace.workers.external.calls import DriverLoop


class StepAnswer(Protocol):
    """What the sampler says to a step."""

    @property
    def action(self) -> Any:
        """In the nesting of the action space; None where none was asked for."""

    @property
    def weights(self) -> tuple[int, int]:
        """(learner_epoch, seq) by which it was chosen."""

    @property
    def error(self) -> HeadraceError | None:
        """The episode will never finish."""


OnAnswer = Callable[[StepAnswer], None]
"""Called once, on the sampler's thread; it must return at once."""


class OpenEpisodes(Protocol):
    """Open episodes by id. Any thread may call; nothing blocks; a refusal is a `HeadraceError` that changes nothing."""

    driver_loop: DriverLoop | None
    """Whom the sampler lets have its thread while it waits; None: it sleeps."""

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
        """All that a client says of one step: what came of the action before, as `AnyStep.news`, and what is seen now.

        The policy is to act then, unless there is an `action` that the client chose, or the episode is over. What is
        seen and done is known to be in its space, and given as `read_row` of its codec gives it.
        """

    def abort(self, episode_id: str, reason: str) -> None:
        """The episode will never finish."""
