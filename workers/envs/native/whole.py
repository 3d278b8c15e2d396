"""A native vector as a whole: built, watched, closed, and built again when it has failed."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from headrace.schemas.errors import EnvContractError, HeadraceError
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.context import EnvContext
from headrace.workers.envs.creators import naming_what_failed
from headrace.workers.envs.failures import Failure
from headrace.workers.envs.native.answers import VectorStep
from headrace.workers.envs.native.construction import limited_construction
from headrace.workers.envs.native.creators import vector_creator
from headrace.workers.envs.native.kinds import autoreset_of, check_vector, seeding_of
from headrace.workers.envs.native.processes import Watchdog, close_vector, processes_of
from headrace.workers.envs.observations import Observations
from headrace.workers.envs.roster import Roster
from headrace.workers.envs.spaces import spaces_of_vector


class WholeVector(Roster):
    """Lanes of one `gymnasium.vector.VectorEnv`, which is the env of each of them, and fails for all of them."""

    _env: Any = None
    _broken: BaseException | None = None
    """Why the vector cannot go on. Open episodes there may still be are lost with the next poll."""
    _pending: VectorStep | None = None
    """The step that has brought first observations of episodes which are not begun yet."""
    _watchdog: Watchdog | None = None

    def build(self, config: EnvRunnerConfig, first: tuple[Any, EnvContext] | None = None) -> None:
        """See `Roster`."""
        self._config = config
        self._creator = vector_creator(config)
        self.stop()
        for lane in self.lanes:
            lane.budget, lane.due_at = self.lanes[0].budget, None
        context = self._context(0, recreated=False) if first is None else first[1]
        try:
            with naming_what_failed(config, 0):
                self._adopt(self._create(context) if first is None else first[0])
            self.spaces = spaces_of_vector(self._env)
            self.gym_spaces = self._env.single_observation_space, self._env.single_action_space
            check_bounds = not config.disable_env_checking
            self.observations = Observations(self.spaces.observation, len(self.lanes), check_bounds=check_bounds)
            self._tell_created(self.lanes[0], context)
        except HeadraceError:
            self.stop()
            raise

    def _create(self, context: EnvContext) -> Any:
        with limited_construction(self._config.env_construct_timeout_s):
            return self._creator(context)

    def _adopt(self, env: Any) -> None:
        self._env, self._broken = env, None
        check_vector(env, len(self.lanes))
        self._mode, self._seeding = autoreset_of(env), seeding_of(env)
        if processes_of(env):
            self._watchdog = Watchdog(env, min(self._config.env_step_timeout_s, self._config.env_reset_timeout_s))
        for lane in self.lanes:
            lane.env = env

    def stop(self) -> None:
        """See `Roster`."""
        self._take_down()
        self._failed.clear()
        self._started.clear()

    def _take_down(self) -> None:
        env, self._env = self._env, None
        if self._watchdog is not None:
            self._watchdog.stop()
            self._watchdog = None
        if env is not None:
            close_vector(env, self._config.env_close_timeout_s, broken=self._broken is not None)
        self._broken, self._pending = None, None
        width = len(self.lanes)
        self._idle = np.ones(width, np.bool_)
        """Lanes without an episode."""
        self._resetting = np.zeros(width, np.bool_)
        """Lanes that the next step resets."""
        for lane in self.lanes:
            lane.release()

    @property
    def repairing(self) -> bool:
        """Whether the vector waits to be built again."""
        return self._env is None

    @property
    def _is_up(self) -> bool:
        return self._env is not None

    # -- when it fails ------------------------------------------------------------------------------------------------

    def fail(self, failure: Failure) -> None:
        """The lane's failure is the whole vector's."""
        super().fail(failure)
        if self._broken is None:
            self._broken = failure.error

    def try_restart(self) -> None:
        """See `EnvDriver`. While episodes are open nothing is done: they are lost with the next poll, by name."""
        while self._failed and self._idle.all():
            failures, self._failed = self._failed, []
            if self.on_failure is not None:
                for each in failures:
                    self.on_failure(self.lanes[each.lane], each)
            first = failures[0]
            first.discarded = sum(each.discarded for each in failures)
            self._take_down()
            for column in self.observations.columns.values():
                column[...] = 0
            if self._is_mended_at_once(self.lanes[0], self._charge_whole(first)):
                self._rebuild()

    def revive(self) -> None:
        """Rebuild the vector if its wait is over."""
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
            self._adopt(self._create(context))
            spaces = spaces_of_vector(self._env)
            if spaces != self.spaces:
                raise EnvContractError("spaces of the vector", repr(spaces), f"those it had before, {self.spaces!r}")
            self._tell_created(self.lanes[0], context)
        except Exception as error:  # noqa: BLE001 - a user's env
            self._broken = error
            self._failed.append(Failure(0, error, at="construction"))
            return
        self.try_reset(range(len(self.lanes)))
