"""Rebuilds envs that have failed: each lane alone, or all lanes together if they share one env."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.errors import EnvRestartBudgetError, words_of
from headrace.workers.envs.failures import Failure, let_go
from headrace.workers.envs.lane import Lane
from headrace.workers.envs.lane_table import LaneTable

OnFailure = Callable[[Lane, Failure], None]
LeaveHost = Callable[[Lane, str], bool]
"""Has a lane that has failed too often wait for another host, and returns whether that helps. The text says why."""


def _stay(lane: Lane, why: str) -> bool:
    return False  # the env has no host to leave


@dataclass(eq=False, repr=False)
class LaneRecovery:
    """Lanes whose envs fail, wait and restart independently, while other lanes go on.

    `rebuild` builds a lane's env and begins an episode there, now or later. If it fails, the failure goes to
    `table.failed`. `take_down` closes a lane's env and clears its observation.
    """

    _table: LaneTable
    _rebuild: Callable[[Lane], None]
    _take_down: Callable[[Lane], None]
    _leave_host: LeaveHost = _stay

    def __post_init__(self) -> None:
        self.up: list[Lane] = []
        """Lanes with an episode."""
        self.are_all_up = False
        self._live: NDArray[np.intp] | None = None
        """`live`, once it was asked for since `refresh`."""

    def refresh(self) -> None:
        """Update the list of lanes with an episode."""
        lanes = self._table.lanes
        self.up = [lane for lane in lanes if lane.episode is not None]
        self.are_all_up = len(self.up) == len(lanes)
        self._live = None

    @property
    def live(self) -> NDArray[np.intp] | None:
        """Lanes with an episode, None when all have one."""
        if self._live is None and not self.are_all_up:
            self._live = np.array([lane.index for lane in self.up], np.intp)
        return self._live

    def stop(self) -> None:
        """Drop all envs, episodes and records. The caller closes the envs."""
        for lane in self._table.lanes:
            lane.release()
        self._table.forget()
        self.refresh()

    def end_episodes(self, lanes: Sequence[int]) -> None:
        """Forget the episodes of `lanes`: they are over, or abandoned."""
        for index in lanes:
            self._table.lanes[index].episode = None
        self.refresh()

    def try_restart(self, on_failure: OnFailure | None) -> None:
        """Close and rebuild the failed envs, now or after their wait.

        Raises `EnvRestartBudgetError` when an env has failed too often, and the env's own error when the config says
        that failed envs are not rebuilt. The next `revive` tries that lane again.
        """
        table = self._table
        while table.failed:
            failure = table.failed[0]
            lane = table.lanes[failure.lane]
            now = time.monotonic()
            if on_failure is not None:
                on_failure(lane, failure)
            self._take_down(lane)
            self.refresh()
            del table.failed[0]
            if table.totals.kept is not None:
                failure.rerun = table.totals.kept.write(table, failure)
            at_once = _is_mended_at_once(table, lane, failure, now, self._leave_host)
            let_go(failure.error)
            if at_once:
                self._rebuild_now(lane)

    def revive(self, on_failure: OnFailure | None) -> None:
        """Rebuild the lanes whose wait is over."""
        now = time.monotonic()
        for lane in self._table.lanes:
            if lane.is_due(now):
                self._rebuild_now(lane)
        self.try_restart(on_failure)

    def _rebuild_now(self, lane: Lane) -> None:
        lane.due_at = None
        lane.seeds.renew()
        self._table.totals.env_rebuilds += 1
        self._rebuild(lane)


class SharedRecovery:
    """Lanes that share one env, which fails, waits and restarts for all of them.

    `rebuild` builds the env again. If it fails, the failure goes to `table.failed`. `take_down` closes the env.
    """

    def __init__(self, table: LaneTable, rebuild: Callable[[], None], take_down: Callable[[], None]) -> None:
        self._table = table
        self._lane = table.lanes[0]
        self._rebuild = rebuild
        self._take_down = take_down

    def begin(self) -> None:
        """Give all lanes the budget of lane 0, because they fail together. The env is about to be built."""
        for lane in self._table.lanes:
            lane.budget, lane.due_at = self._lane.budget, None

    def restart(self, failures: Sequence[Failure]) -> None:
        """Close the env, which failed in all `failures`, and rebuild it now or after its wait.

        Raises as `LaneRecovery.try_restart` does.
        """
        first = failures[0]
        first.discarded = sum(failure.discarded for failure in failures)
        self._take_down()
        at_once = _is_mended_at_once(self._table, self._lane, first, time.monotonic())
        for failure in failures:
            let_go(failure.error)
        if at_once:
            self._rebuild_now()

    def revive(self) -> None:
        """Rebuild the env if its wait is over."""
        if self._lane.is_due(time.monotonic()):
            self._rebuild_now()

    def _rebuild_now(self) -> None:
        self._lane.due_at = None
        self._table.totals.env_rebuilds += 1
        self._rebuild()


def _is_mended_at_once(
    table: LaneTable, lane: Lane, failure: Failure, now: float, leave_host: LeaveHost = _stay
) -> bool:
    """Count the failure. Return True to rebuild the lane now, False to leave it to a `revive` after its wait.

    Only the first failure in a row is rebuilt without a wait. So the worker can stop between two calls of `revive`,
    however long the env goes on failing. Raises the env's error, or `EnvRestartBudgetError`, if it must not be rebuilt.
    """
    lane.due_at = now  # if this raises, the next `revive` tries again
    failure.task = failure.task or (failure.unbegun.task if failure.unbegun is not None else None)
    failure.note(table.totals.failure_groups, table.config.env)
    if failure.task is not None and failure.is_of_env and failure.at == "reset":
        table.tasks.note_begun(table.started)
        table.tasks.refuse(lane.index, failure.task, words_of(failure.error))
    if failure.is_of_env:
        table.totals.env_failures += 1
        table.totals.newest_env_failure = failure.in_words()
        lane.failures += 1
    if not table.config.restart_failed_sub_environments:
        failure.error.add_note("restart_failed_sub_environments = true rebuilds the env and goes on")
        if failure.about:
            failure.error.add_note(failure.about)
        if failure.rerun:
            failure.error.add_note(f"to repeat it: {failure.rerun}")
        raise failure.error
    wait = 0.0
    if failure.is_of_host:
        lane.budget.change_host()
    else:
        try:
            wait = lane.budget.spend(failure.error, now, failure.hint, failure.about)
        except EnvRestartBudgetError:
            if not leave_host(lane, failure.in_words()):
                raise
            lane.budget.change_host()
            return True
    attempt = lane.budget.in_a_row
    failure.report(wait, attempt, lane.budget.attempts, with_traceback=lane.failures == 1)
    lane.due_at = now + wait
    return wait <= 0 and attempt <= 1
