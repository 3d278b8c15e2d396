"""An external env as a whole: built, set going, and built again when its `run()` has ended."""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from headrace.schemas.errors import HeadraceError
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.context import EnvContext
from headrace.workers.envs.creators import find_creator, naming_what_failed
from headrace.workers.envs.failures import Failure
from headrace.workers.envs.roster import Roster
from headrace.workers.external.calls import Place
from headrace.workers.external.driving import Drive
from headrace.workers.external.episodes import EpisodeTable
from headrace.workers.external.self_driven import Deadlines, SelfDrivenEnv

logger = logging.getLogger(__name__)


class WholeExternal(Roster):
    """Lanes of one external env, which is the env of each of them. A lane is a place for one open episode."""

    _drive: Drive | None = None
    """The env that is up; None while it waits to be built again."""

    # -- what the kinds of external env do each in their own way ------------------------------------------------------

    @abstractmethod
    def _checked(self, env: Any) -> SelfDrivenEnv[Any]:
        """Raise unless `env` is an external one of this kind, whose constructor was called."""

    @abstractmethod
    def _learn_spaces(self, env: Any) -> None:
        """This is the first env since `build`."""

    @abstractmethod
    def _check_spaces(self, env: Any) -> None:
        """Raise `EnvContractError` unless they are those of the env before this one."""

    @abstractmethod
    def _new_table(self) -> EpisodeTable[Any]:
        """For the episodes of an env of these spaces."""

    # -- one env after another ----------------------------------------------------------------------------------------

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
                env = self._checked(self._creator(context) if first is None else first[0])
            self._learn_spaces(env)
            self._adopt(env, context)
        except HeadraceError:
            self.stop()
            raise

    def _adopt(self, env: SelfDrivenEnv[Any], context: EnvContext) -> None:
        """Set `env` going, with a table of its own: whoever still drives the one before it has a closed one."""
        config = self._config
        self.episodes = self._new_table()
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
        first = failures[0]
        first.discarded = sum(failure.discarded for failure in failures)
        self._take_down()
        if self._is_mended_at_once(self.lanes[0], self._charge_whole(first)):
            self._build_anew()

    def revive(self) -> None:
        """Rebuild the env if its wait is over, and see to what has failed."""
        due_at = self.lanes[0].due_at
        if due_at is not None and due_at <= time.monotonic():
            self._build_anew()
        self.try_restart()

    def _build_anew(self) -> None:
        self.lanes[0].due_at = None
        self._totals.env_rebuilds += 1
        if self.on_rebuild is not None:
            self.on_rebuild()
        context = self._context(0, recreated=True)
        try:
            env = self._checked(self._creator(context))
            self._check_spaces(env)
            self._adopt(env, context)
        except Exception as error:  # noqa: BLE001 - a user's env
            self._failed.append(Failure(0, error, at="construction"))
