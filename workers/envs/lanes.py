"""The lanes of a vector: each env is built, fails, waits and comes back by itself while the others go on."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.errors import ConfigError, HeadraceError
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.context import EnvContext
from headrace.workers.envs.creators import EnvCreator, find_creator, naming_what_failed
from headrace.workers.envs.failures import Failure
from headrace.workers.envs.lane import Lane, close_envs
from headrace.workers.envs.roster import Roster


class Lanes(Roster):
    """Lanes whose envs fail, wait and come back each by itself."""

    # -- who is up ----------------------------------------------------------------------------------------------------

    @property
    def live(self) -> NDArray[np.intp] | None:
        """Lanes with an episode, None when all have one."""
        if len(self._live) == len(self.lanes):
            return None
        return np.array([lane.index for lane in self._live], np.intp)

    @property
    def repairing(self) -> bool:
        """Whether some lane has no env that could be stepped."""
        return len(self._live) < len(self.lanes)

    @property
    def _is_up(self) -> bool:
        return bool(self._live)

    def end_episodes(self, lanes: Sequence[int]) -> None:
        """Forget the episodes of `lanes`: they are over, or abandoned."""
        for index in lanes:
            self.lanes[index].episode = None
        self._refresh()

    def _refresh(self) -> None:
        self._live = [lane for lane in self.lanes if lane.episode is not None]

    # -- when one fails -----------------------------------------------------------------------------------------------

    def try_restart(self) -> None:
        """Close and rebuild what failed, now or after its wait.

        Raises `EnvRestartBudgetError` when an env has failed too often, and the env's own error when the config says
        that failed envs are not rebuilt. The lane is then tried again by the next `revive`.
        """
        while self._failed:
            failure = self._failed[0]
            lane = self.lanes[failure.lane]
            now = time.monotonic()
            if self.on_failure is not None:
                self.on_failure(lane, failure)
            close_envs([lane.release()], self._config.env_close_timeout_s)
            self._blank(lane)
            lane.due_at = now
            self._refresh()
            del self._failed[0]
            if failure.is_of_env:
                self._totals.env_failures += 1
                lane.failures += 1
            if not self._config.restart_failed_sub_environments:
                raise failure.error
            wait = 0.0 if failure.is_of_host else lane.budget.spend(failure.error, now)
            attempt, attempts = lane.budget.in_a_row, self._config.env_restart_attempts
            failure.report(wait, attempt, attempts, with_traceback=lane.failures == 1)
            lane.due_at = now + wait
            if self._is_mended_at_once(lane, wait):
                self._rebuild(lane)

    def revive(self) -> None:
        """Rebuild lanes whose wait is over."""
        now = time.monotonic()
        for lane in self.lanes:
            if lane.due_at is not None and lane.due_at <= now:
                self._rebuild(lane)
        self.try_restart()

    @abstractmethod
    def _rebuild(self, lane: Lane) -> None:
        """Have the lane's env built anew, and an episode begun there, now or later. Failures wait for `try_restart`."""

    @abstractmethod
    def _blank(self, lane: Lane) -> None:
        """The lane has no env for now; what it saw last is not to be shown to the policy."""


class LaneVector(Lanes):
    """Lanes with an env each, which is an object of this process."""

    def build(self, config: EnvRunnerConfig, first: tuple[Any, EnvContext] | None = None) -> None:
        """See `Roster`."""
        for key, here, whose in (
            ("gym_env_vectorize_mode", None, "a SingleAgentEnvRunner"),
            ("env_placement", "inline", "a runner"),
        ):
            if (asked := getattr(config, key)) != here:
                message = f"{asked!r} is for {whose} that had it from the beginning"
                raise ConfigError(message, key=key)
        self._config = config
        self._creator = find_creator(config.env)
        self.stop()
        creators, contexts = [self._creator] * len(self.lanes), []
        if first is not None:
            creators[0], contexts = (lambda _: first[0]), [first[1]]
        contexts += [self._context(lane.index, recreated=False) for lane in self.lanes[len(contexts) :]]
        try:
            for lane, creator, context in zip(self.lanes, creators, contexts, strict=True):
                lane.due_at = None
                with naming_what_failed(config, lane.index):
                    lane.adopt(self._build_env(creator, context))
            env_0 = self.lanes[0].env
            assert env_0 is not None
            self._learn_spaces(env_0)
            for lane in self.lanes[1:]:
                self._check_spaces(lane)
            for lane, context in zip(self.lanes, contexts, strict=True):
                self._tell_created(lane, context)
        except HeadraceError:
            self.stop()
            raise

    # -- what the kinds of vector do each in their own way ------------------------------------------------------------

    @abstractmethod
    def _build_env(self, creator: EnvCreator, context: EnvContext) -> Any:
        """One env of the right kind; raises `EnvContractError` for another."""

    @abstractmethod
    def _learn_spaces(self, first: Any) -> None:
        """Env 0 was built anew: its spaces are those of all."""

    @abstractmethod
    def _check_spaces(self, lane: Lane) -> None:
        """Raise `EnvContractError` unless the lane's env has the spaces of env 0."""

    def _rebuild(self, lane: Lane) -> None:
        lane.due_at = None
        self._totals.env_rebuilds += 1
        if self.on_rebuild is not None:
            self.on_rebuild()
        context = self._context(lane.index, recreated=True)
        try:
            lane.adopt(self._build_env(self._creator, context))
            self._check_spaces(lane)
            self._tell_created(lane, context)
        except Exception as error:  # noqa: BLE001 - a user's env
            self._failed.append(Failure(lane.index, error, at="construction"))
            return
        self.try_reset([lane.index])

    def stop(self) -> None:
        """Close all envs, within one time limit for all of them."""
        close_envs([lane.release() for lane in self.lanes], self._config.env_close_timeout_s)
        self._failed.clear()
        self._started.clear()
        self._refresh()
