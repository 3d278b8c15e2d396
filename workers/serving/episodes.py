"""What a policy server needs of the table of open episodes that stands between it and the sampler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from headrace.schemas.errors import HeadraceError


class Answer(Protocol):
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


OnAnswer = Callable[[Answer], None]
"""Called once, on the sampler's thread; it must return at once."""


class Episodes(Protocol):
    """Open episodes by id. Any thread may call; nothing blocks; a refusal is a `HeadraceError` that changes nothing."""

    def start(self, episode_id: str | None = None, *, training_enabled: bool = True) -> str:
        """Open an episode."""

    def ask(self, episode_id: str, observation: Any, on_answer: OnAnswer) -> None:
        """Have the current policy act."""

    def log_action(self, episode_id: str, observation: Any, action: Any, on_answer: OnAnswer) -> None:
        """Somebody else has acted; answered when it is taken in."""

    @property
    def log_returns(self) -> Callable[..., None]:
        """Add to what is known since the last action, which is told after the episode's id: `news` of a step."""

    def retract(self, episode_id: str) -> None:
        """Forget what `log_returns` was told since the last action, if the episode is open."""

    def end(self, episode_id: str, observation: Any, on_answer: OnAnswer, *, truncated: bool = False) -> None:
        """The episode is over, and this is what was seen last."""

    def abort(self, episode_id: str, reason: str) -> None:
        """The episode will never finish."""
