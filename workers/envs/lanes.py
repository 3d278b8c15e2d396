"""The lanes of a vector: each env is built, fails, waits and comes back by itself while the others go on."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.errors import CallbackError, EnvError, HeadraceError
from headrace.workers.callbacks import CallbackList
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.context import EnvContext
from headrace.workers.envs.creators import EnvCreator, find_creator
from headrace.workers.envs.failures import Failure
from headrace.workers.envs.lane import Episode, Lane, close_envs
from headrace.workers.envs.restarts import RestartBudget
from headrace.workers.randomness import EnvSeeds, SeedTree
from headrace.workers.totals import RunnerTotals

_WAIT_SLICE_S = 0.02
"""How long to sleep at most before `on_wait` is called again while every env waits to be rebuilt."""


class LaneVector(ABC):
    """`num_envs` lanes. A lane is live while it has an episode.

    Call order of a poll: step, then `fail` and `reset` for what that reported, `recover` last: only that one raises.
    """

    def __init__(
        self,
        config: EnvRunnerConfig,
        worker_index: int,
        seeds: SeedTree,
        totals: RunnerTotals,
        callbacks: CallbackList | None = None,
    ) -> None:
        self._config = config
        self._callbacks = callbacks
        self._worker_index = worker_index
        self._totals = totals
        self.lanes = [
            Lane(i, EnvSeeds(stream, config.max_env_seed), RestartBudget(config, i))
            for i, stream in enumerate(seeds.resets)
        ]
        self.on_rebuild: Callable[[], None] | None = None
        """Called before an env is rebuilt, which may take as long as the env likes."""
        self.on_episode_created: Callable[[Lane, Episode], None] | None = None
        """Called before a reset; what it raises is a failure of the lane."""
        self.on_failure: Callable[[Lane, Failure], None] | None = None
        """Called for each failure before its lane is taken down."""
        self._failed: list[Failure] = []
        self._started: list[int] = []
        self._live: list[Lane] = []
        self.build(config)

    def build(self, config: EnvRunnerConfig) -> None:
        """Build every env anew, closing what was there. An env that cannot be built the first time is an error."""
        self._config = config
        self._creator = find_creator(config.env)
        self.close()
        for lane in self.lanes:
            lane.due_at = None
            try:
                lane.adopt(self._build_env(self._creator, self._context(lane, recreated=False)))
            except HeadraceError:
                self.close()
                raise
            except Exception as error:
                self.close()
                what = f"env {lane.index} ({self._config.env!r}) could not be built"
                raise EnvError(f"{what}: {type(error).__name__}: {error}; check env and env_config") from error
        first = self.lanes[0].env
        assert first is not None
        self._learn_spaces(first)
        for lane in self.lanes[1:]:
            self._check_spaces(lane)
        try:
            for lane in self.lanes:
                self._tell_created(lane, self._context(lane, recreated=False))
        except CallbackError:
            self.close()
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

    @abstractmethod
    def _blank(self, lane: Lane) -> None:
        """The lane has no env for now; what it saw last is not to be shown to the policy."""

    @abstractmethod
    def reset(self, lanes: Sequence[int]) -> None:
        """Begin an episode in each of `lanes`, each with its next seed. Failures wait for `recover`."""

    # -- who is up ----------------------------------------------------------------------------------------------------

    @property
    def live(self) -> NDArray[np.intp] | None:
        """Lanes with an episode, None when all have one."""
        if len(self._live) == len(self.lanes):
            return None
        return np.array([lane.index for lane in self._live], np.intp)

    @property
    def live_count(self) -> int:
        return len(self._live)

    def take_started(self) -> list[int]:
        """Lanes that began an episode since the last call."""
        started, self._started = self._started, []
        return started

    def end_episodes(self, lanes: Sequence[int]) -> None:
        """Forget the episodes of `lanes`: they are over, or abandoned."""
        for index in lanes:
            self.lanes[index].episode = None
        self._refresh()

    def _refresh(self) -> None:
        self._live = [lane for lane in self.lanes if lane.episode is not None]

    # -- when one fails -----------------------------------------------------------------------------------------------

    def fail(self, failure: Failure) -> None:
        """Take the lane out; `recover` decides what becomes of it."""
        self._failed.append(failure)

    def recover(self) -> None:
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
            wait = lane.budget.spend(failure.error, now)
            attempt, attempts = lane.budget.in_a_row, self._config.env_restart_attempts
            failure.report(wait, attempt, attempts, with_traceback=lane.failures == 1)
            lane.due_at = now + wait
            if wait <= 0:
                self._rebuild(lane)

    def revive(self) -> None:
        """Rebuild lanes whose wait is over."""
        now = time.monotonic()
        for lane in self.lanes:
            if lane.due_at is not None and lane.due_at <= now:
                self._rebuild(lane)
        self.recover()

    def next_due_s(self) -> float | None:
        """Seconds until a waiting lane may be rebuilt; None if none waits."""
        due = [lane.due_at for lane in self.lanes if lane.due_at is not None]
        return max(min(due) - time.monotonic(), 0.0) if due else None

    def wait_for_one(
        self, start_episodes: Callable[[Callable[[], None]], None], on_wait: Callable[[], None] | None
    ) -> None:
        """Bring back lanes whose wait is over; while none at all is up, sleep until the first is.

        `start_episodes` is called with what brings back; `on_wait` after every short sleep.
        """
        start_episodes(self.revive)
        while not self._live:
            time.sleep(min(self.next_due_s() or 0.0, _WAIT_SLICE_S))
            if on_wait is not None:
                on_wait()
            start_episodes(self.revive)

    def _rebuild(self, lane: Lane) -> None:
        lane.due_at = None
        self._totals.env_rebuilds += 1
        if self.on_rebuild is not None:
            self.on_rebuild()
        context = self._context(lane, recreated=True)
        try:
            lane.adopt(self._build_env(self._creator, context))
            self._check_spaces(lane)
            self._tell_created(lane, context)
        except Exception as error:  # noqa: BLE001 - a user's env
            self._failed.append(Failure(lane.index, error, at="construction"))
            return
        self.reset([lane.index])

    def _tell_created(self, lane: Lane, context: EnvContext) -> None:
        if self._callbacks is not None and lane.env is not None:
            env = getattr(lane.env, "unwrapped", lane.env)
            self._callbacks.call("on_environment_created", env=env, env_context=context)

    def _context(self, lane: Lane, *, recreated: bool) -> EnvContext:
        return EnvContext(
            self._config.env_config,
            worker_index=self._worker_index,
            num_workers=self._config.num_workers,
            vector_index=lane.index,
            recreated=recreated,
        )

    def close(self) -> None:
        """Close all envs, within one time limit for all of them."""
        close_envs([lane.release() for lane in self.lanes], self._config.env_close_timeout_s)
        self._failed.clear()
        self._started.clear()
        self._refresh()
