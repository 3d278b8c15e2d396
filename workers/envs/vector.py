"""A vector of envs that fail, wait and restart independently, in every placement and pace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.errors import CallbackError
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.backend import EnvBackend, EnvHostsHere, Replies
from headrace.workers.envs.driver import EnvDriver, Pace
from headrace.workers.envs.failures import Failure
from headrace.workers.envs.inline import InlineEnvs, check_inline
from headrace.workers.envs.lane import Episode, Lane
from headrace.workers.envs.lane_table import WAIT_SLICE_S, LaneTable
from headrace.workers.envs.pending_steps import InlineSteps, LockSteps, ReadySteps, SetAside, Steps, hear
from headrace.workers.envs.recovery import LaneRecovery
from headrace.workers.envs.sequential_step import Outcome

_STEPS: dict[Pace, type[LockSteps] | type[ReadySteps]] = {Pace.LOCK_STEP: LockSteps, Pace.READY: ReadySteps}


OpenBackend = Callable[[LaneTable], EnvBackend]
"""Builds the envs that the table's config asks for. Raises where an env cannot be built."""


class EnvVector(EnvDriver):
    """Lanes with an env each, in the backend that `open_backend` opens for each build of all envs, of that `pace`.

    A backend may reset an env in the step that ends its episode, unless a callback must be called before the reset.
    While an env is rebuilt the other envs go on.
    """

    _episode_kind: type[Episode] = Episode

    def __init__(self, table: LaneTable, open_backend: OpenBackend, pace: Pace) -> None:
        self.pace = pace
        self.lanes = table.lanes
        self._table = table
        self._open_backend = open_backend
        self._recovery = LaneRecovery(table, self._rebuild, self._take_down, self._leave_host)
        self._backend: EnvBackend | None = None
        self.build(table.config)

    def build(self, config: EnvRunnerConfig) -> None:
        if isinstance(self._backend, InlineEnvs):
            check_inline(config)  # before the current envs are closed for it
        self._table.config = config
        self.stop()
        self._resetting: dict[int, Episode] = {}
        """Lanes that the vector waits for, and the episodes for which they are reset."""
        self._aside = SetAside(self._table)
        backend = self._backend = self._open_backend(self._table)
        try:
            kind = InlineSteps if backend.replies_at_once else _STEPS[self.pace]
            self._steps: Steps = kind(backend, self._table, self._recovery, self._aside)
            self._resets_ahead, self.replies_at_once = backend.resets_ahead, backend.replies_at_once
            self.halves = self._steps.halves
            self._learn(backend)
            for lane in self.lanes:
                lane.seeds.renew()
                lane.due_at, lane.env = None, self._env_at(lane.index)
                if lane.env is None:
                    self._aside.coming[lane.index] = None
            for lane in self.lanes:
                if lane.env is not None:
                    self._table.tell_created(lane.index)
        except BaseException:
            self.stop()
            raise

    def _learn(self, backend: EnvBackend) -> None:
        """Take over the spaces of newly built envs."""
        self.spaces, self.gym_spaces = backend.spaces, backend.gym_spaces
        self.observations = self._steps.observations()

    def _env_at(self, index: int) -> Any:
        """Return the object that callers get for the env of a lane; None if the lane has none yet."""
        return self._running.env_at(index)

    @property
    def _running(self) -> EnvBackend:
        assert self._backend is not None, "build() opens it"
        return self._backend

    @property
    def steps_to_reset(self) -> bool:
        return self.pace is Pace.READY

    @property
    def has_processes(self) -> bool:
        return not self.replies_at_once

    @property
    def env_hosts(self) -> EnvHostsHere | None:
        return self._backend.env_hosts if self._backend is not None else None

    @property
    def under_way(self) -> set[int]:
        return self._steps.under_way

    # -- steps --------------------------------------------------------------------------------------------------------

    def send_actions(self, columns: dict[str, NDArray[Any]], lanes: NDArray[np.intp] | None = None) -> None:
        """Send `lanes` (None: all live lanes) their actions: their rows of the policy's columns."""
        resets_ahead = self.on_episode_created is None and self._resets_ahead
        if lanes is not None:
            self._steps.send(lanes.tolist(), columns, resets_ahead=resets_ahead)
            return
        if self._resetting:
            self._await_resets()
        self._steps.send_all(columns, self.on_wait, resets_ahead=resets_ahead)

    def poll(self) -> Outcome:
        """Return the results of the actions sent: of all lanes, or of the lanes that have replied."""
        return self._steps.poll(self.on_wait)

    def _catch_up(self) -> None:
        """Wait for the replies to resets that an exception interrupted, and to abandoned steps."""
        if self._resetting:
            self._await_resets()
        self._steps.catch_up(self.on_wait)

    # -- episodes -----------------------------------------------------------------------------------------------------

    def try_reset(self, lanes: Sequence[int]) -> None:
        """Begin an episode in each of `lanes`, each with its next seed, if any. Failures wait for `try_restart`."""
        self._catch_up()
        aside, backend = self._aside, self._running
        awaited: dict[int, Any] = self._resetting if self._steps.waits_for_resets else aside.coming
        for index in lanes:
            lane = self.lanes[index]
            if lane.env is None or index in aside.coming:
                continue
            ahead = aside.ahead.pop(index, None)
            if ahead is None and not backend.keeps_env(index):
                lane.seeds.renew()
            episode = self._create_episode(lane)
            if episode is None:
                continue
            if ahead is not None and ahead[:2] == (episode.reset_seed, episode.task):
                self._begin(lane, episode, ahead[2])
            else:  # also if other tasks have come since the reset ahead
                self._reset(index, episode)
                awaited[index] = episode
                self._table.totals.calls.between()
        self._await_resets()
        self._recovery.refresh()

    def _reset(self, index: int, episode: Episode) -> None:
        if episode.task is not None or self._running.tasks:
            self._running.tell_tasks({index: episode.task})
        self._running.reset(index, episode.reset_seed)

    def _create_episode(self, lane: Lane) -> Episode | None:
        """Return the episode for a reset of the lane, or None if the lane has failed."""
        episode = self._table.create_episode(lane, self._episode_kind)
        failure = self._aside.lost.pop(lane.index, None)
        if failure is None and self.on_episode_created is not None:
            try:
                self.on_episode_created(lane, episode)
            except CallbackError as error:
                failure = Failure(lane.index, error)
        if failure is None:
            return episode
        failure.unbegun = episode
        self._table.failed.append(failure)
        return None

    def _await_resets(self) -> None:
        resetting = self._resetting
        while resetting:
            replies = hear(self._running, self.on_wait)
            self._steps.keep(replies, but=resetting)
            for failure in replies.failures:
                if failure.lane in resetting:
                    failure.unbegun = resetting.pop(failure.lane)
                    self._table.failed.append(failure)
            for index, info in replies.began:
                if index in resetting:
                    self._begin(self.lanes[index], resetting.pop(index), info)
            if self.replies_at_once:
                resetting.clear()  # resets that an exception interrupted get no reply any more

    def _begin(self, lane: Lane, episode: Episode, info: dict[str, Any]) -> None:
        lane.begin_episode(episode, self._table.hear(info))
        self._table.started.append(lane.index)
        if not self.replies_at_once:  # otherwise the observation is in the columns already
            self._running.begin([lane.index])
            self._steps.show(lane.index)

    def end_episodes(self, lanes: Sequence[int]) -> None:
        """Forget the episodes of `lanes`: they are over, or abandoned. A step under way in them does not count."""
        self._steps.abandon(lanes)
        super().end_episodes(lanes)

    # -- failures -----------------------------------------------------------------------------------------------------

    def _take_down(self, lane: Lane) -> None:
        """Close the lane's env, and clear the policy's observation of it."""
        lane.release()
        self._running.close_env(lane.index)
        self.observations.blank(lane.index)

    def _rebuild(self, lane: Lane) -> None:
        if self.on_rebuild is not None:
            self.on_rebuild()
        self._aside.ahead.pop(lane.index, None)
        self._aside.coming[lane.index] = None
        self._running.rebuild(lane.index)
        while self.replies_at_once and lane.index in self._aside.coming:
            self._settle(self._running.step_wait())

    def _leave_host(self, lane: Lane, why: str) -> bool:
        failing = {other.index for other in self.lanes if other.budget.in_a_row}
        return self._running.leave_host(lane.index, failing, why)

    def _revive(self) -> None:
        if self._aside.coming:
            self._settle(self._running.step_wait(0.0))
        super()._revive()

    def _pause(self) -> None:
        if self._aside.coming:
            self._steps.keep(self._running.step_wait(WAIT_SLICE_S))
        else:
            super()._pause()

    def _settle(self, replies: Replies) -> None:
        """Reset the envs that were built, and begin the episodes whose reset is done."""
        self._steps.keep(replies)
        built, self._aside.built = self._aside.built, []
        arrived, self._aside.arrived = self._aside.arrived, []
        for index in built:
            if index in self._aside.coming:  # otherwise its process was lost again since
                self._reset_rebuilt(self.lanes[index])
        for index, info in arrived:
            episode = self._aside.coming.pop(index, None)
            if episode is not None:
                self._begin(self.lanes[index], episode, info)
        self._recovery.refresh()

    def _reset_rebuilt(self, lane: Lane) -> None:
        lane.env = self._env_at(lane.index)
        try:
            self._table.tell_created(lane.index)
        except CallbackError as error:
            del self._aside.coming[lane.index]
            self._table.failed.append(Failure(lane.index, error, at="construction"))
            return
        episode = self._create_episode(lane)
        if episode is None:
            del self._aside.coming[lane.index]
        else:
            self._aside.coming[lane.index] = episode
            self._reset(lane.index, episode)

    # -- rendering and closing ----------------------------------------------------------------------------------------

    def try_render_at(self, index: int) -> NDArray[np.uint8] | None:
        """Return one env's picture, rgb uint8 (height, width, 3); None where it gives none, or is being stepped.

        Takes as long as the env does. An env in a process has the deadline of a step; after it the process is lost.
        """
        if not self._running.renders or self._steps.is_stepping(index):
            return None
        self._catch_up()
        aside = self._aside
        if self.lanes[index].env is None or index in aside.coming or index in aside.lost:
            return None
        self._running.render(index)
        while True:
            replies = hear(self._running, self.on_wait)
            self._steps.keep(replies)
            if replies.pictures or index in aside.lost:
                return dict(replies.pictures).get(index)

    def stop(self) -> None:
        self._recovery.stop()
        if self._backend is not None:
            self._backend.close()
