"""An external env as a whole: built, set going, and built again when its `run()` has ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from headrace.schemas.errors import ConfigError, EnvContractError, HeadraceError
from headrace.schemas.spaces import Spaces
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.context import EnvContext
from headrace.workers.envs.creators import find_creator, naming_what_failed
from headrace.workers.envs.failures import Failure
from headrace.workers.envs.roster import Roster
from headrace.workers.envs.spaces import spaces_of
from headrace.workers.external.calls import Place
from headrace.workers.external.driving import Drive
from headrace.workers.external.env import Deadlines, ExternalEnv
from headrace.workers.external.episodes import ExternalEpisodes

logger = logging.getLogger(__name__)


class WholeExternal(Roster):
    """Lanes of one `ExternalEnv`, which is the env of each of them. A lane is a place for one open episode."""

    _drive: Drive | None = None
    """The env that is up; None while it waits to be built again."""

    def build(self, config: EnvRunnerConfig, first: tuple[Any, EnvContext] | None = None) -> None:
        """See `Roster`."""
        self._config = config
        self._creator = find_creator(config.env)
        self.stop()
        for lane in self.lanes:
            lane.budget, lane.due_at = self.lanes[0].budget, None
        context = self._context(0, recreated=False) if first is None else first[1]
        try:
            with naming_what_failed(config, 0):
                env = _checked(self._creator(context) if first is None else first[0])
            self.spaces: Spaces = spaces_of(env)  # type: ignore[arg-type]
            self.gym_spaces = env.observation_space, env.action_space
            self._adopt(env, context)
        except HeadraceError:
            self.stop()
            raise

    def _adopt(self, env: ExternalEnv, context: EnvContext) -> None:
        """Set `env` going, with a table of its own: whoever still drives the one before it has a closed one."""
        config = self._config
        self.episodes = ExternalEpisodes(
            self.spaces,
            len(self.lanes),
            check_bounds=not config.disable_env_checking,
            takes_logged=not config.module_to_env,
        )
        deadlines = Deadlines(
            config.external_start_timeout_s, config.external_action_timeout_s, config.external_log_timeout_s
        )
        env.attach(self.episodes, deadlines)
        for lane in self.lanes:
            lane.env = env  # type: ignore[assignment]
        self._drive = Drive(env)
        self._tell_created(self.lanes[0], context)
        self._drive.start()

    def stop(self) -> None:
        """See `Roster`."""
        self._take_down()
        self._failed.clear()
        self._started.clear()

    def _take_down(self) -> None:
        drive, self._drive = self._drive, None
        self._places: dict[int, Place] = {}
        """Of the lanes that are live."""
        self._under_way: set[int] = set()
        for lane in self.lanes:
            lane.release()
        if drive is not None:
            drive.stop(self._config.env_close_timeout_s)

    @property
    def repairing(self) -> bool:
        """Whether there is something to see to before the next poll."""
        return bool(self._failed or self._started) or self._drive is None

    @property
    def _is_up(self) -> bool:
        return self._drive is not None

    def wait_for_one(
        self, start_episodes: Callable[[Callable[[], None]], None], on_wait: Callable[[], None] | None
    ) -> None:
        """See `EnvDriver`. Nothing is waited for: whether anyone is there, or comes, is for `poll` to see."""
        start_episodes(self.revive)

    def try_render_at(self, index: int) -> None:
        """See `EnvDriver`: nobody knows what an external env looks like."""

    # -- when it fails ------------------------------------------------------------------------------------------------

    def _charge(self, failure: Failure) -> None:
        """One episode failed here, by a callback's doing. Nothing is rebuilt, but it may not go on so for ever."""
        if not self._config.restart_failed_sub_environments:
            raise failure.error
        logger.error(
            "the episode in place %d failed at %s (%s); %d steps discarded",
            failure.lane,
            failure.at,
            failure.error,
            failure.discarded,
        )
        self.lanes[0].budget.spend(failure.error, time.monotonic())

    def _restart(self, failures: Sequence[Failure]) -> None:
        """Close the env and build it anew, now or after its wait: it failed, and took all its episodes along."""
        first, lane, now = failures[0], self.lanes[0], time.monotonic()
        first.discarded = sum(failure.discarded for failure in failures)
        self._take_down()
        lane.due_at = now
        if first.is_of_env:
            self._totals.env_failures += 1
            lane.failures += 1
        if not self._config.restart_failed_sub_environments:
            raise first.error
        wait = lane.budget.spend(first.error, now)
        first.report(wait, lane.budget.in_a_row, self._config.env_restart_attempts, with_traceback=lane.failures == 1)
        lane.due_at = now + wait
        if wait <= 0:
            self._rebuild()

    def revive(self) -> None:
        """Rebuild the env if its wait is over, and see to what has failed."""
        due_at = self.lanes[0].due_at
        if due_at is not None and due_at <= time.monotonic():
            self._rebuild()
        self.try_restart()

    def _rebuild(self) -> None:
        self.lanes[0].due_at = None
        self._totals.env_rebuilds += 1
        if self.on_rebuild is not None:
            self.on_rebuild()
        context = self._context(0, recreated=True)
        try:
            env = _checked(self._creator(context))
            spaces = spaces_of(env)  # type: ignore[arg-type]
            if spaces != self.spaces:
                raise EnvContractError("spaces of the env", repr(spaces), f"those it had before, {self.spaces!r}")
            self._adopt(env, context)
        except Exception as error:  # noqa: BLE001 - a user's env
            self._failed.append(Failure(0, error, at="construction"))


def _checked(env: Any) -> ExternalEnv:
    """Raises unless `env` is an external one, whose constructor was called."""
    if not isinstance(env, ExternalEnv):
        raise EnvContractError("environment", f"{type(env).__module__}.{type(env).__qualname__}", "an ExternalEnv")
    if not hasattr(env, "action_space"):
        raise ConfigError(
            f"{type(env).__name__} must call super().__init__(action_space, observation_space)", key="env"
        )
    return env
