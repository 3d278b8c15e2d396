"""What a sampler asks of its envs, whatever kind they are.

    while sampling:   send_actions(columns) ── poll() ── try_reset(lanes that ended) ── try_restart() if some failed

The kinds there are: envs of their own in this process (`vector.py`), in other ones (`process/`) or on other machines
(`remote/`), all of them behind one object that a user wrote (`user_vector.py`), one native vector of gymnasium's kind
(`native/`), and episodes that drive themselves (`workers/external/`), clients' among them (`workers/serving/`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.spaces import Spaces
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.failures import Failure
from headrace.workers.envs.lane import Episode, Lane
from headrace.workers.envs.observations import Observations
from headrace.workers.envs.stepping import Outcome


class EnvDriver(Protocol):
    """Lanes that are stepped in lock-step. A lane is live while it has an episode.

    Nothing raises but `build`, `try_restart` and `wait_for_one`; a failure comes as one of an `Outcome`, or waits for
    `try_restart`. What every lane sees stands in `observations.columns`, overwritten by `poll` and `try_reset`.
    """

    lanes: list[Lane]
    spaces: Spaces
    gym_spaces: tuple[Any, Any]
    observations: Observations
    on_rebuild: Callable[[], None] | None
    on_episode_created: Callable[[Lane, Episode], None] | None
    on_failure: Callable[[Lane, Failure], None] | None
    on_wait: Callable[[], None] | None

    @property
    def live(self) -> NDArray[np.intp] | None:
        """Lanes with an episode, None when all have one."""

    @property
    def repairing(self) -> bool:
        """Whether some env waits to be built again, so that `wait_for_one` is to be called before the next poll."""

    @property
    def seeds_every_episode(self) -> bool:
        """Whether each episode begins with a seed of its own, so that it can be begun again."""

    @property
    def steps_to_reset(self) -> bool:
        """Whether a lane may need a poll that is no step to begin its next episode, so that others get ahead of it."""

    def build(self, config: EnvRunnerConfig) -> None:
        """Build all envs anew, closing what was there; an env that cannot be built the first time is an error."""

    def send_actions(self, columns: dict[str, NDArray[Any]]) -> None:
        """The policy's columns, one row for every lane; live lanes are to act by them."""

    def poll(self) -> Outcome:
        """What came of the actions sent. May block as long as an env takes to step."""

    def try_reset(self, lanes: Sequence[int]) -> None:
        """Have an episode begin in each of `lanes`: now, or with a later poll where the envs reset themselves."""

    def try_restart(self) -> None:
        """Close and rebuild what failed, now or after its wait.

        Raises `EnvRestartBudgetError` when an env has failed too often, and the env's own error when the config says
        that failed envs are not rebuilt.
        """

    def wait_for_one(
        self, start_episodes: Callable[[Callable[[], None]], None], on_wait: Callable[[], None] | None
    ) -> None:
        """Bring back what failed and has waited long enough; sleep while nothing at all is up."""

    def take_started(self) -> list[int]:
        """Lanes that began an episode since the last call."""

    def end_episodes(self, lanes: Sequence[int]) -> None:
        """Forget the episodes of `lanes`: they are over, or abandoned."""

    def fail(self, failure: Failure) -> None:
        """Take the lane out; `try_restart` decides what becomes of it."""

    def try_render_at(self, index: int) -> NDArray[np.uint8] | None:
        """One env's picture, rgb uint8 (height, width, 3); None where it gives none."""

    def stop(self) -> None:
        """Close all envs, within one time limit for all of them."""


class ReadyDriver(EnvDriver, Protocol):
    """Lanes that are stepped each in its own time.

    What a lane sees is true until it is stepped: `observations.columns` keep it while an action is under way.
    """

    halves: list[NDArray[np.intp]]
    """Lanes that are to act together, when all of them that are live can; none: each lane acts when it can."""

    @property
    def under_way(self) -> set[int]:
        """Lanes with an episode whose action is not answered."""

    def send_actions_of(self, lanes: NDArray[np.intp], columns: dict[str, NDArray[Any]]) -> None:
        """`lanes`, live and not under way, are to act by their rows of the policy's columns. Returns at once."""

    def poll(self) -> Outcome:
        """What came of actions sent, of those lanes that are ready; `Outcome.lanes` says of which.

        Waits until somebody can act, and then `remote_env_batch_wait_ms` for more; or until there is something else to
        see to.
        """
