"""The lanes of a vector, what has begun and failed in them, and the wait while nothing is up."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.workers.callbacks import CallbackList
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.context import EnvContext
from headrace.workers.envs.failures import Failure
from headrace.workers.envs.lane import Episode, Lane
from headrace.workers.envs.rendering import render_at
from headrace.workers.envs.restarts import RestartBudget
from headrace.workers.metrics.totals import RunnerTotals
from headrace.workers.randomness.seeds import EnvSeeds, SeedTree

WAIT_SLICE_S = 0.02
"""How long to sleep at most before `on_wait` is called again while every env waits to be rebuilt."""


class Roster(ABC):
    """`num_envs` lanes. A lane is live while it has an episode.

    Call order of a poll: step, then `fail` and `try_reset` for what that reported, `try_restart` last: only that one
    raises. `first`: what the creator gave for env 0, for which it is not called again, and what it was told.
    """

    def __init__(
        self,
        config: EnvRunnerConfig,
        worker_index: int,
        seeds: SeedTree,
        totals: RunnerTotals,
        callbacks: CallbackList | None = None,
        first: tuple[Any, EnvContext] | None = None,
    ) -> None:
        self._config = config
        self._callbacks = callbacks
        self._worker_index = worker_index
        self._totals = totals
        self._seeds = seeds
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
        self.on_wait: Callable[[], None] | None = None
        """Called now and then while a driver waits for envs that are elsewhere."""
        self._failed: list[Failure] = []
        self._started: list[int] = []
        self.build(config, first)

    @property
    def steps_to_reset(self) -> bool:
        """Whether a lane may need a poll that is no step to begin its next episode, so that others get ahead of it."""
        return False

    # -- what the kinds of vector do each in their own way ------------------------------------------------------------

    @abstractmethod
    def build(self, config: EnvRunnerConfig, first: tuple[Any, EnvContext] | None = None) -> None:
        """Build every env anew, closing what was there. An env that cannot be built the first time is an error."""

    @property
    @abstractmethod
    def live(self) -> NDArray[np.intp] | None:
        """Lanes with an episode, None when all have one."""

    @property
    @abstractmethod
    def repairing(self) -> bool:
        """Whether `wait_for_one` is to be called before the next poll."""

    @property
    @abstractmethod
    def _is_up(self) -> bool:
        """Whether anything can be stepped."""

    @abstractmethod
    def try_reset(self, lanes: Sequence[int]) -> None:
        """Begin an episode in each of `lanes`, each with its next seed. Failures wait for `try_restart`."""

    @abstractmethod
    def end_episodes(self, lanes: Sequence[int]) -> None:
        """Forget the episodes of `lanes`: they are over, or abandoned."""

    @abstractmethod
    def try_restart(self) -> None:
        """Close and rebuild what failed, now or after its wait."""

    @abstractmethod
    def revive(self) -> None:
        """Rebuild what has waited long enough."""

    @abstractmethod
    def stop(self) -> None:
        """Close all envs, within one time limit for all of them."""

    # -- what all of them do alike ------------------------------------------------------------------------------------

    def take_started(self) -> list[int]:
        """Lanes that began an episode since the last call."""
        started, self._started = self._started, []
        return started

    def fail(self, failure: Failure) -> None:
        """Take the lane out; `try_restart` decides what becomes of it."""
        self._failed.append(failure)

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
        while not self._is_up:
            self._pause()
            if on_wait is not None:
                on_wait()
            start_episodes(self.revive)

    def _pause(self) -> None:
        time.sleep(min(self.next_due_s() or 0.0, WAIT_SLICE_S))

    def try_render_at(self, index: int) -> NDArray[np.uint8] | None:
        """One env's picture, rgb uint8 (height, width, 3); None where it gives none."""
        return render_at(self.lanes[index].env, index)

    def _tell_created(self, lane: Lane, context: EnvContext) -> None:
        if self._callbacks is not None and lane.env is not None:
            env = getattr(lane.env, "unwrapped", lane.env)
            self._callbacks.call("on_environment_created", env=env, env_context=context)

    def _charge_whole(self, first: Failure) -> float:
        """All lanes failed with `first`, being one thing; how many seconds that waits before it is built anew.

        Raises the env's own error where the config says that nothing is, and `EnvRestartBudgetError`.
        """
        lane, now = self.lanes[0], time.monotonic()
        lane.due_at = now
        if first.is_of_env:
            self._totals.env_failures += 1
            lane.failures += 1
        if not self._config.restart_failed_sub_environments:
            raise first.error
        wait = lane.budget.spend(first.error, now)
        first.report(wait, lane.budget.in_a_row, self._config.env_restart_attempts, with_traceback=lane.failures == 1)
        lane.due_at = now + wait
        return wait

    def _is_mended_at_once(self, lane: Lane, wait_s: float) -> bool:
        """Whether what failed in `lane` is to be built anew now, and not by the next `revive`.

        Only once: between two calls of `revive` whoever is to stop can stop, however long the env goes on failing.
        """
        return wait_s <= 0 and lane.budget.in_a_row <= 1

    def _context(self, index: int, *, recreated: bool) -> EnvContext:
        return context_of(self._config, self._worker_index, index, self._seeds, recreated=recreated)


def context_of(
    config: EnvRunnerConfig, worker_index: int, index: int, seeds: SeedTree, *, recreated: bool = False
) -> EnvContext:
    """What the creator of env `index` is told. Its seed is another one each time."""
    return EnvContext(
        config.env_config,
        worker_index=worker_index,
        num_workers=config.num_workers,
        vector_index=index,
        num_envs=config.num_envs,
        recreated=recreated,
        seed=seeds.makings.next(index, config.num_envs, config.max_env_seed),
    )
