"""How envs that have failed come back: each lane by itself, or all lanes with the one env that they share."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.workers.envs.failures import Failure
from headrace.workers.envs.lane import Lane
from headrace.workers.envs.lane_table import LaneTable

OnFailure = Callable[[Lane, Failure], None]
StartEpisodes = Callable[[Callable[[], None]], None]
"""Called with what brings envs back, and may begin episodes by it."""


def wait_for_one(
    is_up: Callable[[], bool],
    revive: Callable[[], None],
    pause: Callable[[], None],
    start_episodes: StartEpisodes,
    on_wait: Callable[[], None] | None,
) -> None:
    """Bring back the envs whose wait is over. While no env is up, sleep until the first is.

    Calls `start_episodes` with `revive`, and `on_wait` after every short sleep.
    """
    start_episodes(revive)
    while not is_up():
        pause()
        if on_wait is not None:
            on_wait()
        start_episodes(revive)


class LaneRecovery:
    """Lanes whose envs fail, wait and come back each by itself, while the others go on.

    `rebuild` builds a lane's env and begins an episode there, at once or later; a failure of that goes to
    `table.failed`. `take_down` closes a lane's env and blanks what it saw.
    """

    def __init__(self, table: LaneTable, rebuild: Callable[[Lane], None], take_down: Callable[[Lane], None]) -> None:
        self.up: list[Lane] = []
        """Lanes with an episode."""
        self.up_indices: list[int] = []
        self._table = table
        self._rebuild = rebuild
        self._take_down = take_down

    def refresh(self) -> None:
        """Find out which lanes have an episode."""
        self.up = [lane for lane in self._table.lanes if lane.episode is not None]
        self.up_indices = [lane.index for lane in self.up]

    @property
    def are_all_up(self) -> bool:
        """Whether every lane has an episode."""
        return len(self.up) == len(self._table.lanes)

    @property
    def live(self) -> NDArray[np.intp] | None:
        """Lanes with an episode, None when all have one."""
        return None if self.are_all_up else np.array(self.up_indices, np.intp)

    def end_episodes(self, lanes: Sequence[int]) -> None:
        """Forget the episodes of `lanes`: they are over, or abandoned."""
        for index in lanes:
            self._table.lanes[index].episode = None
        self.refresh()

    def try_restart(self, on_failure: OnFailure | None) -> None:
        """Close and rebuild what failed, now or after its wait.

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
            lane.due_at = now
            self.refresh()
            del table.failed[0]
            wait = self._charge(lane, failure, now)
            if is_mended_at_once(lane, wait):
                self._rebuild(lane)

    def _charge(self, lane: Lane, failure: Failure, now: float) -> float:
        """Count the failure, and return the seconds that the lane waits before it is rebuilt."""
        table = self._table
        if failure.is_of_env:
            table.totals.env_failures += 1
            lane.failures += 1
        if not table.config.restart_failed_sub_environments:
            raise failure.error
        wait = 0.0 if failure.is_of_host else lane.budget.spend(failure.error, now)
        attempt, attempts = lane.budget.in_a_row, table.config.env_restart_attempts
        failure.report(wait, attempt, attempts, with_traceback=lane.failures == 1)
        lane.due_at = now + wait
        return wait

    def revive(self, on_failure: OnFailure | None) -> None:
        """Rebuild the lanes whose wait is over."""
        now = time.monotonic()
        for lane in self._table.lanes:
            if lane.is_due(now):
                self._rebuild(lane)
        self.try_restart(on_failure)


def is_mended_at_once(lane: Lane, wait_s: float) -> bool:
    """Return whether what failed in `lane` is rebuilt now, and not by the next `revive`.

    Only the first failure in a row is: the worker can stop between two calls of `revive`, however long the env goes on
    failing.
    """
    return wait_s <= 0 and lane.budget.in_a_row <= 1
