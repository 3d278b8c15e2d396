"""EnvPool with a batch_size below its num_envs: it answers for the envs that are ready, while other envs step.

An answer has `batch_size` envs, and comes when that many are ready. To ensure that it always comes, all envs step or
reset whenever the driver asks. An env whose episode was abandoned finishes its step, and is reset then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.accounts.user_calls import UserCall
from headrace.schemas.basics.printable import brief
from headrace.schemas.basics.stop_event import raise_stop
from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.chunks.spaces import nest
from headrace.schemas.errors import EnvContractError
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.actions import action_root
from headrace.workers.envs.driver import Pace
from headrace.workers.envs.failures import Failure
from headrace.workers.envs.lane import Episode
from headrace.workers.envs.lane_table import LaneTable
from headrace.workers.envs.native.creators import Seeding, seeding_of
from headrace.workers.envs.native.infos import lanes_of_rows
from headrace.workers.envs.native.lanes import NativeLanes
from headrace.workers.envs.native.vector import NativeVector
from headrace.workers.envs.native.vector_step import VectorStep, bad_rewards, read_step
from headrace.workers.envs.observations import Observations
from headrace.workers.envs.rendering import render_at
from headrace.workers.envs.sequential_step import Outcome, tell_each


def is_partial(env: Any) -> bool:
    """Return whether `env` is an EnvPool, without a wrapper, that answers for a part of its envs at a time."""
    is_pool = seeding_of(env) is Seeding.NONE and env is env.unwrapped
    return is_pool and env.config["batch_size"] < env.num_envs


def open_native(table: LaneTable, first: Any = None) -> NativeLanes:
    """Return the driver of a native vector: of `first`, which its creator has built, or of one to build later."""
    return PartialNativeVector(table, first) if first is not None and is_partial(first) else NativeVector(table, first)


class PartialNativeVector(NativeLanes):
    """Native lanes with a pace of their own. Its seeds are those of the vector's construction.

    `poll` may block as long as the slowest env of a batch takes, without a call of `on_wait`.
    """

    pace = Pace.READY
    steps_to_reset = True
    seeds_every_episode = False

    def build(self, config: EnvRunnerConfig, first: Any = None) -> None:
        super().build(config, first)
        if not is_partial(self._env):
            self.stop()
            expected = "below num_envs, as it was when this runner was made; make a new one"
            raise EnvContractError("batch_size of the vector", "another kind of vector", expected)
        batch_size = self._env.config["batch_size"]
        self._news = Observations(self.spaces.observation, batch_size, note_outside=self._table.note_outside)

    def _take_down(self) -> None:
        super()._take_down()
        self._awaited: set[int] = set()
        """Lanes that step."""
        self._stale: set[int] = set()
        """Lanes that step for an episode that is over."""
        self._coming: dict[int, Episode] = {}
        """Lanes that are reset, now or soon, and the episodes that begin there."""
        self._arrived: list[tuple[int, dict[str, Any]]] = []
        """Lanes in `_coming` whose reset is done, with its info."""

    # -- which lanes are up -------------------------------------------------------------------------------------------

    @property
    def under_way(self) -> set[int]:
        return self._awaited

    @property
    def repairing(self) -> bool:
        return self._env is None or bool(self._arrived) or not self._is_up

    @property
    def _is_up(self) -> bool:
        return not self._idle.all()

    def end_episodes(self, lanes: Sequence[int]) -> None:
        """Forget the episodes of `lanes`. A step that is under way for one of them does not count."""
        super().end_episodes(lanes)
        self._stale |= self._awaited.intersection(lanes)
        self._awaited.difference_update(lanes)

    # -- steps --------------------------------------------------------------------------------------------------------

    def send_actions(self, columns: dict[str, NDArray[Any]], lanes: NDArray[np.intp] | None = None) -> None:
        """Send `lanes` (None: all live lanes) their actions: their rows of the policy's columns. Does not block."""
        lanes = np.flatnonzero(~self._idle) if lanes is None else lanes
        rows = {name: column[lanes] for name, column in columns.items()}
        actions = nest(self.spaces.action, rows, action_root(rows))
        self._awaited.update(lanes.tolist())
        self._try(lambda: self._env.send(actions, lanes.astype(np.int32)))

    def poll(self) -> Outcome:
        """Return the results of the actions of the lanes that have answered. Waits for a batch."""
        received = self._receive()
        if received is None:
            return self._lost({}, [], {})
        lanes, step, bad = received
        place_of = {lane: place for place, lane in enumerate(lanes.tolist()) if lane in self._awaited}
        bad |= {int(lanes[at]): e for at, e in bad_rewards(step, np.array([*place_of.values()], np.intp), None).items()}
        done = step.terminated | step.truncated
        ended = [(lane, step.end_of(place)) for lane, place in place_of.items() if done[place] and lane not in bad]
        rewards = {lane: float(step.rewards[place]) for lane, place in place_of.items()}
        infos = [(lane, step.infos[lane]) for lane in sorted(place_of) if lane in step.infos]
        if bad:
            self._broken = next(iter(bad.values()))
            outcome = self._lost(bad, ended, rewards)
            outcome.infos = [(lane, info) for lane, info in infos if lane in dict(ended)]
            return outcome
        answered = np.array(sorted(place_of), np.intp)
        self._awaited.difference_update(place_of)
        return Outcome(np.array([rewards[lane] for lane in answered.tolist()]), ended, [], infos, lanes=answered)

    def _receive(self) -> tuple[NDArray[np.intp], VectorStep, dict[int, Exception]] | None:
        """Return the lanes of the next answer, their step with its infos by lane, and errors by lane.

        Return None if the vector is broken.
        """
        with self._table.totals.calls.of(UserCall.STEP, -1):
            answer = self._try(self._env.recv)
        if answer is None:
            return None
        try:
            step = read_step(answer, self._env.config["batch_size"])
            lanes = np.array(lanes_of_rows(step.infos, len(self.lanes)))
            if len(lanes) != len(step.rewards):
                seen = brief(step.infos.get("env_id"))
                raise EnvContractError("infos['env_id']", seen, f"{len(step.rewards)} envs, each once")
            problems = {int(lanes[place]): error for place, error in self._news.put_rows(step.observations)}
            infos, untold = tell_each([*self._infos_by_lane(step.infos).items()], self._table.tell)
            problems |= untold
        except EnvContractError as error:
            self._broken = error
            return None
        for name, column in self._news.columns.items():
            self.observations.columns[name][lanes] = column
        stale = self._stale.intersection(lanes.tolist())
        self._stale -= stale
        step.infos = dict(infos)
        self._arrived += [(i, step.infos.get(i, {})) for i in lanes.tolist() if i in self._coming and i not in stale]
        self._reset([lane for lane in sorted(stale) if lane in self._coming])
        return lanes, step, {lane: error for lane, error in problems.items() if lane not in stale}

    def _try(self, call: Callable[[], Any]) -> Any:
        """Return the result of `call`. If it raises, mark the vector as broken; for a broken vector return None."""
        if self._broken is not None:
            return None
        try:
            return call()
        except BaseException as error:  # noqa: BLE001 - a user's env
            raise_stop(error)
            self._broken = error
            return None

    def _lost(self, bad: dict[int, Exception], ended: list[tuple[int, ChunkEnd]], rewards: dict[int, float]) -> Outcome:
        """Lose the vector and all open episodes except those in `ended`. The lanes in `bad` caused the failure.

        `rewards`: of the lanes that have stepped. All live lanes were sent an action.
        """
        assert self._broken is not None, "there is a reason"
        lanes = np.flatnonzero(~self._idle)
        over = {lane for lane, _ in ended}
        lost = [lane for lane in lanes.tolist() if lane not in over]
        failures = [Failure(lane, bad.get(lane, self._broken), stepped=lane in rewards) for lane in lost]
        failures.sort(key=lambda failure: failure.lane not in bad)
        if not failures:
            self._table.failed.append(Failure(next(iter(bad), 0), self._broken, at="reset"))
        self._awaited.clear()
        earned = np.array([rewards.get(lane, 0.0) for lane in lanes.tolist()])
        return Outcome(earned, ended, failures, lanes=lanes, begun=not failures)

    # -- episodes -----------------------------------------------------------------------------------------------------

    def try_reset(self, lanes: Sequence[int]) -> None:
        """Begin an episode in each of `lanes` with a later poll, unless one is about to begin there."""
        if self._env is None or self._broken is not None:
            return
        lanes = [index for index in lanes if index not in self._coming]
        for index in lanes:
            episode = self.lanes[index].create_episode(None, Episode)
            try:
                if self.on_episode_created is not None:
                    self.on_episode_created(self.lanes[index], episode)
            except Exception as error:  # noqa: BLE001 - a user's callback
                self.fail(Failure(index, error, unbegun=episode))
                return
            self._coming[index] = episode
        self._reset([lane for lane in lanes if lane not in self._stale])

    def _reset(self, lanes: Sequence[int]) -> None:
        if lanes:
            self._try(lambda: self._env._reset(np.array(lanes, np.int32)))  # its `reset` waits for answers too

    def _revive(self) -> None:
        arrived, self._arrived = self._arrived, []
        for index, info in arrived:
            episode = self._coming.pop(index)
            self.lanes[index].begin_episode(episode, info or episode.reset_info)
            self._idle[index] = False
            self._table.started.append(index)
        super()._revive()

    def try_render_at(self, index: int) -> NDArray[np.uint8] | None:
        return render_at(self.lanes[index].env, index)

    def _pause(self) -> None:
        """Wait for the first resets, or until the vector may be rebuilt, because no lane is up."""
        if self._env is None:
            super()._pause()
            return
        received = self._receive()
        bad = received[2] if received is not None else {}
        if bad:
            self._broken = next(iter(bad.values()))
        if self._broken is not None and not self._table.failed:
            self._table.failed.append(Failure(next(iter(bad), 0), self._broken, at="reset"))
