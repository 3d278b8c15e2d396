"""A native vector as a driver: actions go in as one array, and rewards and observations come out as arrays.

The vector fails as a whole. A failure in one lane (its env, an observation or a callback) ends the open episodes of all
lanes, and the vector is rebuilt. Episodes that had finished in the same step are kept.

The source of an episode's first observation depends on the vector's autoreset mode:

    DISABLED    from a reset by the driver, with a seed of the lane's own
    SAME_STEP   from the step that ends the previous episode, whose last observation is in the infos
    NEXT_STEP   from the next step; the lane's action and reward in it mean nothing

When all lanes begin together, the driver resets them with seeds, in each mode.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import orjson
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from numpy.typing import NDArray

from headrace.schemas.accounts.user_calls import UserCall
from headrace.schemas.basics.stop_event import raise_stop
from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.chunks.spaces import nest
from headrace.schemas.errors import EnvContractError, EnvHangError, words_of
from headrace.workers.envs.action_masks import MASK
from headrace.workers.envs.actions import action_root
from headrace.workers.envs.checks import take_reset_apart
from headrace.workers.envs.driver import Pace
from headrace.workers.envs.failures import Failure
from headrace.workers.envs.lane import Episode
from headrace.workers.envs.native.creators import Seeding, raised_in
from headrace.workers.envs.native.infos import as_numpy, final_infos, is_tensor, moved
from headrace.workers.envs.native.lanes import NativeLanes
from headrace.workers.envs.native.vector_step import (
    VectorStep,
    bad_rewards,
    final_observations,
    in_lane_order,
    read_step,
)
from headrace.workers.envs.rendering import picture_of, warn_of
from headrace.workers.envs.sequential_step import Outcome, tell_each


class NativeVector(NativeLanes):
    """Native lanes that step together."""

    pace = Pace.LOCK_STEP
    _mask_as: Callable[[NDArray[np.bool_]], Any]
    """Makes a mask of lanes to reset in the form of the vector's own arrays."""
    _pending: VectorStep | None = None
    """The step with the first observations of episodes that have not begun yet."""

    @property
    def seeds_every_episode(self) -> bool:
        return self._mode is AutoresetMode.DISABLED and self._seeding is Seeding.EACH

    @property
    def steps_to_reset(self) -> bool:
        return self._mode is AutoresetMode.NEXT_STEP

    def _take_down(self) -> None:
        super()._take_down()
        self._pending = None
        self._resetting = np.zeros(len(self.lanes), np.bool_)
        """Lanes that the next step resets."""
        self._was_reset = False

    # -- one step -----------------------------------------------------------------------------------------------------

    def send_actions(self, columns: dict[str, NDArray[Any]], lanes: NDArray[np.intp] | None = None) -> None:
        """Take the policy's columns, one row for every lane. They step together, so `lanes` is None."""
        self._actions = nest(self.spaces.action, columns, action_root(columns))

    def poll(self) -> Outcome:
        """Step all envs, and return the results."""
        live, self._pending = self.live, None
        if self._broken is not None:
            return self._lost(live, {}, self._broken, stepped=False)
        try:
            with self._limited(UserCall.STEP):
                answer = self._env.step(self._actions)
        except BaseException as error:  # noqa: BLE001 - a user's env
            raise_stop(error)
            return self._lost(live, dict.fromkeys(raised_in(error), error), error, stepped=False)
        try:
            step = in_lane_order(read_step(answer, len(self.lanes)))
            problems = self.observations.put_rows(step.observations, step.lanes)
            return self._take_in(step, live, dict(problems))
        except EnvContractError as error:
            return self._lost(live, {}, error)

    def _take_in(self, step: VectorStep, live: NDArray[np.intp] | None, bad: dict[int, Any]) -> Outcome:
        """Take in a step. `bad`: lane -> the error of its observation in the columns."""
        done = step.terminated | step.truncated
        ended = np.flatnonzero(done & ~self._idle).tolist() if done.any() else []
        error = next(iter(bad.values()), None)
        if ended and self._mode is AutoresetMode.SAME_STEP:
            self._pending = step
            problems = self.observations.put(np.array(ended), final_observations(step.infos, ended, len(self.lanes)))
            # These are first observations. A bad one is no failure of the episode that has ended.
            bad = {lane: problem for lane, problem in bad.items() if lane not in ended}
            bad |= {ended[position]: problem for position, problem in problems}
        bad = bad_rewards(step, live, self._actions) | bad
        rewards = step.rewards if live is None else step.rewards[live]
        error = next(iter(bad.values()), error)
        infos: list[tuple[int, dict[str, Any]]] = []
        if step.infos and (self._table.config.infos == "all" or MASK in step.infos):
            infos, untold = self._step_infos(step, done)
            bad |= untold
            error = next(iter(bad.values()), error)
        ends = [(lane, step.end_of(lane)) for lane in ended if lane not in bad]
        if error is not None:
            kept = {lane for lane, _ in ends}
            outcome = self._lost(live, bad, error, rewards=rewards, ended=ends)
            outcome.infos = [(lane, info) for lane, info in infos if lane in kept]
            return outcome
        outcome = Outcome(rewards, ends, [], infos)
        if self._mode is AutoresetMode.NEXT_STEP:
            if self._resetting.any():
                lanes = np.flatnonzero(self._resetting).tolist()
                self._begin_unseeded(lanes, step)
                outcome.begun, outcome.resets = True, len(lanes)
            self._resetting = done & ~self._resetting
        return outcome

    def _step_infos(
        self, step: VectorStep, done: NDArray[np.bool_]
    ) -> tuple[list[tuple[int, dict[str, Any]]], dict[int, EnvContractError]]:
        """Return the infos of lanes that stepped, and errors by lane. A lane that this step only reset has no info."""
        told = self._infos_by_lane(step.infos)
        if self._mode is AutoresetMode.SAME_STEP and done.any():
            finals = final_infos(step.infos, len(self.lanes)) if self._table.config.infos == "all" else {}
            told |= {lane: finals.get(lane, {}) for lane in np.flatnonzero(done).tolist()}
        infos = [(lane, info) for lane, info in sorted(told.items()) if info and not self._idle[lane]]
        return tell_each(infos, self._table.tell)

    def _lost(
        self,
        live: NDArray[np.intp] | None,
        bad: dict[int, Any],
        error: BaseException,
        *,
        stepped: bool = True,
        rewards: NDArray[np.float64] | None = None,
        ended: Sequence[tuple[int, ChunkEnd]] = (),
    ) -> Outcome:
        """Lose the vector and all open episodes except those in `ended`. The lanes in `bad` caused the failure."""
        self._broken, self._culprits = error, set(bad)
        lanes = np.arange(len(self.lanes)) if live is None else live
        spared = {lane for lane, _ in ended}
        failures = [Failure(i, bad.get(i, error), stepped=stepped) for i in lanes.tolist() if i not in spared]
        failures.sort(key=lambda failure: failure.lane not in bad)
        outcome = Outcome(np.zeros(len(lanes)) if rewards is None else rewards, list(ended), failures)
        if not failures:
            self._table.failed.append(Failure(next(iter(bad), 0), error, at="step"))
            outcome.begun = True
        return outcome

    def try_render_at(self, index: int) -> NDArray[np.uint8] | None:
        """Return one env's picture, rgb uint8 (height, width, 3); None where it gives none.

        If the envs are in processes and the picture does not come in time, the vector is lost.
        """
        try:
            with self._limited(UserCall.RENDER):
                return picture_of(self._env, index)
        except BaseException as error:  # noqa: BLE001 - a user's env
            raise_stop(error)
            warn_of(index, words_of(error))
            if isinstance(error, EnvHangError):
                self._broken = error
            return None

    # -- episodes -----------------------------------------------------------------------------------------------------

    def try_reset(self, lanes: Sequence[int]) -> None:
        """Begin an episode in each of `lanes`. If all lanes begin together, reset them with seeds."""
        if self._env is None or self._broken is not None:
            return
        if len(lanes) == len(self.lanes) or self._mode is AutoresetMode.DISABLED:
            for values, own in self._by_task(lanes):
                if self._broken is None:
                    self._reset(own, values)
        elif self._pending is not None:
            # Write the observations of all lanes again, which is cheaper than taking the batch apart.
            self.observations.put_rows(self._pending.observations, self._pending.lanes, new=())
            self._begin_unseeded(lanes, self._pending)

    def _by_task(self, lanes: Sequence[int]) -> list[tuple[dict[str, Any], Sequence[int]]]:
        """Return the values of the tasks of the lanes' next episodes, none without a task, and the lanes of each."""
        draws, found = self._table.tasks, dict[bytes, tuple[dict[str, Any], list[int]]]()
        if not draws:
            return [({}, lanes)]
        for index in lanes:
            task = draws.peek(index, self.lanes[index].episodes_begun)[1]
            values = {} if task is None else deepcopy(dict(task.values))
            found.setdefault(orjson.dumps(values), (values, []))[1].append(index)
        return [*found.values()]

    def _reset(self, lanes: Sequence[int], values: dict[str, Any]) -> None:
        """Reset `lanes` with one call; the vector's first one resets all, since the others have no observation yet."""
        episodes, arguments = self._create_episodes(lanes)
        only = lanes if self._was_reset and len(lanes) < len(self.lanes) else None
        if only is not None:  # rows of other lanes may hold anything
            values["reset_mask"] = self._mask_as(np.isin(range(len(self.lanes)), lanes))
        if values:
            arguments["options"] = values
        try:
            for episode in episodes:
                if self.on_episode_created is not None:
                    self.on_episode_created(self.lanes[episode.env_index], episode)
            with self._limited(UserCall.RESET):
                answer = self._env.reset(**arguments)
            observations, infos = as_numpy(take_reset_apart(answer))
            self._mask_as = _mask_maker(self._env, answer[0])
            order = moved(infos, len(self.lanes))
            for _, problem in self.observations.put_rows(observations, order, only=only, new=lanes):
                raise problem
            told = self._infos_by_lane(infos)
            tell = self._table.tell
            told = {lane: tell(told[lane]) for lane in lanes if lane in told}
        except BaseException as error:  # noqa: BLE001 - a user's env
            raise_stop(error)
            self._broken = error
            self._table.failed += [Failure(episode.env_index, error, unbegun=episode) for episode in episodes]
            return
        self._was_reset, self._resetting[:] = True, False
        for episode in episodes:
            self._begin(episode, told.get(episode.env_index, {}))

    def _create_episodes(self, lanes: Sequence[int]) -> tuple[list[Episode], dict[str, Any]]:
        """Return the next episodes in `lanes`, and the arguments of `reset` that pass their seeds."""
        seed = self.lanes[0].seeds.next() if self._seeding is Seeding.ONE else None
        draw = None if self._seeding is Seeding.EACH else lambda: seed
        episodes = [self._table.create_episode(self.lanes[i], Episode, draw) for i in lanes]
        if draw is None:
            by_lane = {episode.env_index: episode.reset_seed for episode in episodes}
            return episodes, {"seed": [by_lane.get(i) for i in range(len(self.lanes))]}
        return episodes, {"seed": seed} if self._seeding is Seeding.ONE else {}

    def _begin_unseeded(self, lanes: Sequence[int], step: VectorStep) -> None:
        """Begin the episodes whose envs the vector has reset by itself."""
        told = self._infos_by_lane(step.infos)
        for index in lanes:
            lane = self.lanes[index]
            episode = lane.create_episode(None, Episode)
            try:
                if self.on_episode_created is not None:
                    self.on_episode_created(lane, episode)
                info = self._table.tell(told[index]) if index in told else {}
            except Exception as error:  # noqa: BLE001 - a user's callback, or its env's info
                self.fail(Failure(index, error, unbegun=episode))
                continue
            self._begin(episode, info)

    def _begin(self, episode: Episode, info: dict[str, Any]) -> None:
        index = episode.env_index
        # Each new dict that lives on makes garbage collection dearer, so an episode without an info keeps its own.
        self.lanes[index].begin_episode(episode, info or episode.reset_info)
        self._idle[index] = False
        self._table.started.append(index)


def _mask_maker(env: Any, observations: Any) -> Callable[[NDArray[np.bool_]], Any]:
    """Return a function to tensors for a vector of tensors, on their device, else one to numpy's arrays.

    Gymnasium's own vectors take masks of numpy alone, even if a wrapper turns their answers into tensors.
    """
    while isinstance(observations, Mapping | tuple) and observations:
        observations = next(iter(observations.values() if isinstance(observations, Mapping) else observations))
    if not is_tensor(observations) or isinstance(env.unwrapped, SyncVectorEnv | AsyncVectorEnv):
        return np.asarray
    return lambda mask: observations.new_tensor(mask, dtype=sys.modules["torch"].bool)
