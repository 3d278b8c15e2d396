"""Envs that are elsewhere, as a vector that a sampler steps in lock-step: rebuilt in the background."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Container, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.chunk import ChunkEnd
from headrace.schemas.errors import CallbackError, EnvError
from headrace.schemas.spaces import Spaces
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.backend import EnvBackend, Replies
from headrace.workers.envs.context import EnvContext
from headrace.workers.envs.failures import Failure
from headrace.workers.envs.lane import Episode, Lane
from headrace.workers.envs.lanes import Lanes
from headrace.workers.envs.observations import Observations
from headrace.workers.envs.placeholder import EnvPlaceholder
from headrace.workers.envs.roster import WAIT_SLICE_S
from headrace.workers.envs.spaces import to_gym
from headrace.workers.envs.stepping import Outcome


class ElsewhereVector(Lanes):
    """Lanes of an `EnvBackend`. A poll waits for every lane that was sent an action; restarts wait for nobody.

    An env is reset by its process in the step that ends its episode, unless a callback is to be told before.
    """

    seeds_every_episode = True
    _episode_kind: type[Episode] = Episode
    _pool: EnvBackend | None = None

    def build(self, config: EnvRunnerConfig, first: tuple[Any, EnvContext] | None = None) -> None:
        """See `Roster`."""
        self._config = config
        self.stop()
        self._contexts: dict[int, EnvContext] = {}
        """What each lane's creator was told."""
        pool = self._pool = self._open_pool(config)
        self._sent: list[int] = []
        self._resetting: dict[int, Episode] = {}
        self._ahead: dict[int, tuple[int, dict[str, Any]]] = {}
        """Lane -> (seed, info) of a reset that was done already, for an episode that has not begun."""
        self._lost: dict[int, Failure] = {}
        """What happened to lanes that were not asked for anything: told when they are next."""
        self._coming: dict[int, Episode | None] = {}
        """Lanes that are being rebuilt; the episode that is to begin there, once that is known."""
        self._built: list[int] = []
        self._arrived: list[tuple[int, dict[str, Any]]] = []
        try:
            self._learn_spaces(pool)
            for lane in self.lanes:
                lane.due_at = None
                if pool.env_at(lane.index) is not None:
                    lane.adopt(self._stand_in(lane.index))
                else:
                    self._coming[lane.index] = None
            for lane in self.lanes:
                if lane.env is not None:
                    self._tell_created(lane, self._contexts[lane.index])
        except BaseException:
            self.stop()
            raise

    def _learn_spaces(self, pool: EnvBackend) -> None:
        """The pool is there: this is what its envs see and do."""
        self.spaces: Spaces = pool.spaces
        self.gym_spaces = to_gym(pool.spaces.observation), to_gym(pool.spaces.action)
        self.observations = Observations(
            pool.spaces.observation, pool.width, check_bounds=False, columns=pool.observations
        )

    def _stand_in(self, index: int) -> Any:
        """What is shown to whoever asks for the env."""
        return EnvPlaceholder(index, self.gym_spaces)

    @abstractmethod
    def _open_pool(self, config: EnvRunnerConfig) -> EnvBackend:
        """A pool of `config.num_envs` lanes, whose creators are told the seeds that `_seed_for` gives."""

    def _seed_for(self, index: int, recreated: bool) -> int:
        context = self._contexts[index] = self._context(index, recreated=recreated)
        assert context.seed is not None, "a runner has seeds"
        return context.seed

    @property
    def _running(self) -> EnvBackend:
        assert self._pool is not None, "build() starts it"
        return self._pool

    def _blank(self, lane: Lane) -> None:
        for column in self.observations.columns.values():
            column[lane.index] = 0

    # -- the usual course ---------------------------------------------------------------------------------------------

    def send_actions(self, columns: dict[str, NDArray[Any]]) -> None:
        """See `EnvDriver`. Returns at once."""
        self._catch_up()
        self._sent = [lane.index for lane in self._live if lane.index not in self._lost]
        seeds = None
        if self.on_episode_created is None:
            seeds = {index: self.lanes[index].seeds.peek() for index in self._sent}
        everybody = len(self._sent) == len(self.lanes)
        self._running.step_async(None if everybody else self._sent, columns, seeds)

    def poll(self) -> Outcome:
        """See `EnvDriver`. What no env survives takes as long as its deadline."""
        waiting = set(self._sent)
        ended: list[tuple[int, ChunkEnd]] = []
        infos: list[tuple[int, dict[str, Any]]] = []
        failures = [self._lost.pop(lane.index) for lane in self._live if lane.index in self._lost]
        while waiting:
            answers = self._hear()
            waiting.difference_update(answers.stepped)
            failed = [failure for failure in answers.failures if failure.lane in waiting]
            failures += failed
            waiting.difference_update(failure.lane for failure in failed)
            self._put_aside(answers, but={failure.lane for failure in failed})
            ended += answers.ended
            infos += answers.infos
        self._sent = []
        return Outcome(self._rewards(failures), ended, failures, infos)

    def _hear(self) -> Replies:
        """The next answers, whosever they are; `on_wait` is called now and then until there are any."""
        while not (answers := self._running.step_wait(WAIT_SLICE_S, batch_wait_s=WAIT_SLICE_S)):
            if self.on_wait is not None:
                self.on_wait()
        return answers

    def _rewards(self, failures: Sequence[Failure]) -> NDArray[np.float64]:
        live = self.live
        rewards = self._running.rewards.copy() if live is None else self._running.rewards[live]
        if failures:
            lanes = np.arange(len(self.lanes)) if live is None else live
            rewards[np.isin(lanes, [failure.lane for failure in failures])] = 0.0
        return rewards

    def try_reset(self, lanes: Sequence[int]) -> None:
        """Begin an episode in each of `lanes`, each with its next seed. Failures wait for `try_restart`."""
        self._catch_up()
        for index in lanes:
            lane = self.lanes[index]
            if lane.env is None or index in self._coming:
                continue
            episode = self._create_episode(lane)
            if episode is None:
                continue
            seed, info = self._ahead.pop(index, (None, {}))
            if seed == episode.seed:
                self._begin(lane, episode, info)
            else:
                self._running.reset(index, episode.seed)
                self._expect(index, episode)
        self._await_resets()
        self._refresh()

    def _expect(self, index: int, episode: Episode) -> None:
        """The lane is being reset for `episode`."""
        self._resetting[index] = episode

    def _await_resets(self) -> None:
        resetting = self._resetting
        while resetting:
            answers = self._hear()
            self._put_aside(answers, but=resetting)
            for failure in answers.failures:
                if failure.lane in resetting:
                    failure.unbegun = resetting.pop(failure.lane)
                    self._failed.append(failure)
            for index, info in answers.began:
                if index in resetting:
                    self._begin(self.lanes[index], resetting.pop(index), info)

    def _catch_up(self) -> None:
        """Hear to its end what was broken off when `on_wait` raised. An episode that lost a step by it cannot go on."""
        if self._resetting:
            self._await_resets()
        if self._sent:
            broken = [index for index in self._sent if self.lanes[index].episode is not None]
            self._lost |= {index: Failure(index, EnvError("a poll was broken off in its step")) for index in broken}
            self._lost |= {failure.lane: failure for failure in self.poll().failures}

    def _create_episode(self, lane: Lane) -> Episode | None:
        """The episode that a reset is to begin; None if the lane has failed."""
        episode = lane.create_episode(lane.seeds.next(), self._episode_kind)
        failure = self._lost.pop(lane.index, None)
        if failure is None and self.on_episode_created is not None:
            try:
                self.on_episode_created(lane, episode)
            except CallbackError as error:
                failure = Failure(lane.index, error)
        if failure is None:
            return episode
        failure.unbegun = episode
        self._failed.append(failure)
        return None

    def _begin(self, lane: Lane, episode: Episode, info: dict[str, Any]) -> None:
        self._running.begin([lane.index])
        lane.begin_episode(episode, info)
        self._started.append(lane.index)

    # -- what comes besides -------------------------------------------------------------------------------------------

    def _put_aside(self, answers: Replies, but: Container[int] = ()) -> None:
        """Keep what was answered for lanes other than those in `but`, until there is a time for it."""
        self._built += answers.built
        for index, info in answers.began:
            if index in self._coming:
                self._arrived.append((index, info))
            elif index not in but:
                self._ahead[index] = self.lanes[index].seeds.peek(), info
        for failure in answers.failures:
            if failure.lane in self._coming:
                failure.unbegun = self._coming.pop(failure.lane)
                self._failed.append(failure)
            elif failure.lane not in but:
                self._lost[failure.lane] = failure

    def _rebuild(self, lane: Lane) -> None:
        lane.due_at = None
        self._totals.env_rebuilds += 1
        if self.on_rebuild is not None:
            self.on_rebuild()
        self._ahead.pop(lane.index, None)
        self._coming[lane.index] = None
        self._running.rebuild(lane.index)

    def revive(self) -> None:
        """Rebuild lanes whose wait is over, and begin an episode where an env is back."""
        if self._coming:
            self._put_aside(self._running.step_wait(0.0))
            self._settle()
        super().revive()

    def _settle(self) -> None:
        built, self._built = self._built, []
        arrived, self._arrived = self._arrived, []
        for index in built:
            lane = self.lanes[index]
            if index in self._coming:  # else its process was lost again since
                lane.adopt(self._stand_in(index))
                self._reset_rebuilt(lane)
        for index, info in arrived:
            episode = self._coming.pop(index, None)
            if episode is not None:
                self._begin(self.lanes[index], episode, info)
        self._refresh()

    def _reset_rebuilt(self, lane: Lane) -> None:
        try:
            self._tell_created(lane, self._contexts[lane.index])
        except CallbackError as error:
            del self._coming[lane.index]
            self._failed.append(Failure(lane.index, error, at="construction"))
            return
        episode = self._create_episode(lane)
        if episode is None:
            del self._coming[lane.index]
        else:
            self._coming[lane.index] = episode
            self._running.reset(lane.index, episode.seed)

    def try_render_at(self, index: int) -> NDArray[np.uint8] | None:
        """See `EnvDriver`: nothing that is elsewhere can be shown, unless a kind of pool knows how."""
        return None

    def _pause(self) -> None:
        if self._coming:
            self._put_aside(self._running.step_wait(WAIT_SLICE_S))
        else:
            super()._pause()

    def stop(self) -> None:
        """Close all envs, and end all processes, within one time limit for all of them."""
        for lane in self.lanes:
            lane.release()
        self._failed.clear()
        self._started.clear()
        self._refresh()
        if self._pool is not None:
            self._pool.close()
