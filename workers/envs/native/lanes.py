"""The lanes of a native vector. The vector is built, watched, closed, and rebuilt after a failure."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from headrace.schemas.accounts.user_calls import SETTINGS, UserCall
from headrace.schemas.basics.dropped import when_dropped
from headrace.schemas.basics.stop_event import raise_stop
from headrace.schemas.errors import EnvContractError, HeadraceError
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.action_masks import MASK
from headrace.workers.envs.creators import naming_what_failed
from headrace.workers.envs.driver import EnvDriver
from headrace.workers.envs.failures import Failure
from headrace.workers.envs.lane_table import LaneTable
from headrace.workers.envs.native.creators import Seeding, autoreset_of, check_vector, seeding_of, vector_creator
from headrace.workers.envs.native.infos import infos_by_lane, without_rows
from headrace.workers.envs.native.vector_processes import (
    Watchdog,
    close_vector,
    end_watched,
    limited_construction,
    processes_of,
)
from headrace.workers.envs.observations import Observations
from headrace.workers.envs.ownership import free
from headrace.workers.envs.recovery import SharedRecovery
from headrace.workers.envs.spaces import spaces_of

log = logging.getLogger(__name__)

_MASKS = (MASK, f"_{MASK}", "env_id", "_env_id")
"""Infos that bind random actions, and those that say of which lanes they are."""


class NativeLanes(EnvDriver):
    """Lanes that share one `gymnasium.vector.VectorEnv`. If the vector fails, all lanes fail.

    `first` is a vector that was built to find out its kind.
    """

    def __init__(self, table: LaneTable, first: Any = None) -> None:
        self.lanes = table.lanes
        self.halves: list[NDArray[np.intp]] = []
        self._table = table
        self._recovery = SharedRecovery(table, self._rebuild, self._take_down_failed)
        self._env: Any = None
        self._broken: BaseException | None = None
        """Error for which the vector cannot go on. Episodes that are still open are lost with the next poll."""
        self._culprits = set[int]()
        """The lanes whose envs caused the failure of the vector, as far as this is known."""
        self._watchdog: Watchdog | None = None
        self._untold = set[str]()
        """Infos that no lane gets, of which the log has said so."""
        self.build(table.config, first)

    # -- the vector ---------------------------------------------------------------------------------------------------

    def build(self, config: EnvRunnerConfig, first: Any = None) -> None:
        table = self._table
        table.config = config
        self._creator = vector_creator(config)
        self.stop()
        self._recovery.begin()
        try:
            with naming_what_failed(config, 0):
                if first is None:
                    table.new_context(0)
                    first = self._create()
                self._adopt(first)
            self.spaces = spaces_of(self._env, "single_")
            self.gym_spaces = self._env.single_observation_space, self._env.single_action_space
            space, note_outside = self.spaces.observation, table.note_outside
            self.observations = Observations(space, len(self.lanes), note_outside=note_outside)
            table.tell_created(0)
        except HeadraceError:
            self.stop()
            table.disown()
            raise

    def _create(self) -> Any:
        limit = limited_construction(self._table.config.construct_timeout_s)
        with self._table.totals.calls.of(UserCall.CONSTRUCTION, -len(self.lanes)), limit:
            return self._creator(self._table.contexts[0])

    def _adopt(self, env: Any) -> None:
        config = self._table.config
        self._env, self._broken = env, None
        check_vector(env, len(self.lanes))
        self._mode, self._seeding, self._kind = autoreset_of(env), seeding_of(env), type(env.unwrapped).__name__
        if processes_of(env):
            watchdog = Watchdog(lambda: env, min(config.env_step_timeout_s, config.env_reset_timeout_s))
            sentence = "the processes of a vector were dropped without stop()"
            self._watchdog, self._dropped = watchdog, when_dropped(self, sentence, end_watched, watchdog, env)
        for lane in self.lanes:
            lane.seeds.renew()
            lane.env = env

    def why_no_tasks(self, group: int) -> str:
        """Return why the vector takes no tasks: only a vector that Headrace resets can."""
        if self._mode is not AutoresetMode.DISABLED:
            why = f"{self._kind} resets its envs by itself; make it with AutoresetMode.DISABLED, or give the single env"
            return f"{why}, with gym_env_vectorize_mode = None"
        has_groups = not group or self._seeding is Seeding.EACH
        return "" if has_groups else f"{self._kind} takes no seed for each env, so no groups; publish without"

    @contextmanager
    def _limited(self, kind: UserCall) -> Iterator[None]:
        """Mark the call of the vector. Kill the vector's processes if it takes longer than the setting of `kind` says.

        The envs of a vector without processes may step one after the other, so each has that time.
        """
        lane = -len(self.lanes)
        limit: AbstractContextManager[None] = nullcontext()
        if self._watchdog is not None:
            limit_s = self._table.config.call_limits()[kind]
            lane, limit = -1, self._watchdog.limited(kind.name.lower(), limit_s, SETTINGS[kind])
        with self._table.totals.calls.of(kind, lane), limit:
            yield

    def stop(self) -> None:
        """Close the vector, within 5 s."""
        self._take_down()
        self._table.forget()

    def _take_down(self) -> None:
        env, self._env = self._env, None
        if self._watchdog is not None:
            self._dropped.detach()
            self._watchdog.stop()
            self._watchdog = None
        if env is not None:
            close_vector(env, broken=self._broken is not None)
            self._table.disown()
        self._broken = None
        self._idle = np.ones(len(self.lanes), np.bool_)
        """Lanes without an episode."""
        for lane in self.lanes:
            lane.release()

    def _take_down_failed(self) -> None:
        """Close the vector, and clear the policy's observations of it."""
        self._take_down()
        self.observations.blank(...)

    def _infos_by_lane(self, infos: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        """Return the infos of lanes, only masks where the config wants none. Log once what no lane gets."""
        if self._table.config.infos == "none":
            infos = {key: infos[key] for key in _MASKS if key in infos} if MASK in infos else {}
        width = len(self.lanes)
        for key in without_rows(infos, width):
            if key not in self._untold:
                self._untold.add(key)
                log.warning("info %r of the vector has no row for each of its %d envs, so no chunk has it", key, width)
        return infos_by_lane(infos, width)

    # -- which lanes are up -------------------------------------------------------------------------------------------

    @property
    def live(self) -> NDArray[np.intp] | None:
        return np.flatnonzero(~self._idle) if self._idle.any() else None

    @property
    def has_processes(self) -> bool:
        """Return whether the vector has processes."""
        return self._watchdog is not None

    @property
    def repairing(self) -> bool:
        """Return whether the vector waits to be built again."""
        return self._env is None

    @property
    def _is_up(self) -> bool:
        return self._env is not None

    def end_episodes(self, lanes: Sequence[int]) -> None:
        for index in lanes:
            self.lanes[index].episode = None
        self._idle[list(lanes)] = True

    # -- failures -----------------------------------------------------------------------------------------------------

    def fail(self, failure: Failure) -> None:
        """Take all lanes out: a failure of one lane fails the whole vector."""
        super().fail(failure)
        if self._broken is None:
            self._broken = failure.error

    def try_restart(self) -> None:
        """Close and rebuild the vector if it has failed, now or after its wait.

        Does nothing while episodes are open: the next poll reports each of them lost, with its own failure. Raises
        `EnvRestartBudgetError` when the vector has failed too often, and its own error when the config says that
        failed envs are not rebuilt.
        """
        table = self._table
        while table.failed and self._idle.all():
            failures, table.failed = table.failed, []
            if self.on_failure is not None:
                for each in failures:
                    self.on_failure(self.lanes[each.lane], each)
            # Of the other modes it is not known how one env is built.
            is_of_one = table.config.gym_env_vectorize_mode in ("sync", "async") and failures[0].lane in self._culprits
            if table.totals.kept is not None and is_of_one:
                failures[0].rerun = table.totals.kept.write(table, failures[0])
            self._recovery.restart(failures)

    def _revive(self) -> None:
        self._recovery.revive()
        self.try_restart()

    def _rebuild(self) -> None:
        if self.on_rebuild is not None:
            self.on_rebuild()
        free(self._table.contexts[0].life)
        self._table.new_context(0, recreated=True)
        try:
            self._adopt(self._create())
            spaces = spaces_of(self._env, "single_")
            if spaces != self.spaces:
                raise EnvContractError("spaces of the vector", repr(spaces), f"those it had before, {self.spaces!r}")
            self._table.tell_created(0)
        except BaseException as error:  # noqa: BLE001 - a user's env
            raise_stop(error)
            self._broken = error
            self._table.failed.append(Failure(0, error, at="construction"))
            return
        self.try_reset(range(len(self.lanes)))
