"""The table of open episodes, as the sessions of a policy server see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.errors import HeadraceError
from headrace.workers.external.calls import DriverLoop


class StepAnswer(Protocol):
    """The sampler's answer to a step."""

    @property
    def action(self) -> Any:
        """The action, in the nesting of the action space; None where the client asked for none."""

    @property
    def weights(self) -> tuple[int, int]:
        """The version, (learner_epoch, seq), of the weights that chose the action."""

    @property
    def error(self) -> HeadraceError | None:
        """The reason if the episode was aborted."""


OnAnswer = Callable[[StepAnswer], None]
"""Called once, in the sampler's thread. It must return at once."""


class OpenEpisodes(Protocol):
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
