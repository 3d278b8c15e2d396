"""Envs elsewhere that are stepped each in its own time: whoever has answered acts again."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.chunk import ChunkEnd
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.backend import Replies
from headrace.workers.envs.context import EnvContext
from headrace.workers.envs.failures import Failure
from headrace.workers.envs.lane import Episode
from headrace.workers.envs.observations import Observations
from headrace.workers.envs.process.elsewhere import ElsewhereVector
from headrace.workers.envs.process.vector import ProcessVector
from headrace.workers.envs.roster import WAIT_SLICE_S
from headrace.workers.envs.stepping import Outcome


class ReadyVector(ElsewhereVector):
    """A `ReadyDriver`. Neither steps, resets nor restarts wait for one another; an abandoned step is awaited.

    A pool writes while a policy acts, so that what lanes see is copied from its columns as it is told. Which pool that
    is, the other base of a subclass says.
    """

    steps_to_reset = True

    def build(self, config: EnvRunnerConfig, first: tuple[Any, EnvContext] | None = None) -> None:
        """See `Roster`."""
        self._waiting: set[int] = set()
        """Lanes that were sent an action and have not answered."""
        self._abandoned: set[int] = set()
        """Of these, whose episode is over: nobody wants their answers."""
        self._answered: list[int] = []
        """Lanes whose answers are to be told by the next poll, and what there is to tell."""
        self._ended: list[tuple[int, ChunkEnd]] = []
        self._infos: list[tuple[int, dict[str, Any]]] = []
        self._broken: list[Failure] = []
        every = np.arange(len(self.lanes))
        # Of neighbours, who share a process or a host, one is to act while the other is stepped.
        self.halves = [every[::2], every[1::2]] if config.double_buffering and len(every) > 1 else []
        self._batch_wait_s = (config.remote_env_batch_wait_ms or 0.0) / 1000.0
        super().build(config, first)
        self.observations = Observations(self.spaces.observation, len(self.lanes), check_bounds=False)

    @property
    def under_way(self) -> set[int]:
        """See `ReadyDriver`."""
        told = {*self._answered, *(failure.lane for failure in self._broken)}
        return (self._waiting - self._abandoned) | told

    def send_actions_of(self, lanes: NDArray[np.intp], columns: dict[str, NDArray[Any]]) -> None:
        """See `ReadyDriver`."""
        self._broken += [self._lost.pop(lane) for lane in lanes.tolist() if lane in self._lost]
        broken = {failure.lane for failure in self._broken}
        sent = [lane for lane in lanes.tolist() if lane not in broken]
        self._waiting.update(sent)
        seeds = None
        if self.on_episode_created is None:
            seeds = {lane: self.lanes[lane].seeds.peek() for lane in sent}
        if sent:
            self._running.step_async(sent, columns, seeds)

    def poll(self) -> Outcome:
        """See `ReadyDriver`."""
        self._listen(0.0 if self._has_news else WAIT_SLICE_S)
        while not self._has_news:
            if self.on_wait is not None:
                self.on_wait()
            self._listen(WAIT_SLICE_S)
        return self._take_news()

    def _listen(self, timeout_s: float) -> None:
        wait = self._batch_wait_s
        if answers := self._running.step_wait(timeout_s + wait, batch_wait_s=wait):
            self._put_aside(answers)

    @property
    def _has_news(self) -> bool:
        """Whether somebody can act, or there is something to see to."""
        if self._built or self._arrived or self._failed or self.next_due_s() == 0.0:
            return True
        waiting, live = self._waiting - self._abandoned, {lane.index for lane in self._live}
        if not self.halves:
            return len(waiting) < len(live)
        return any(
            waiting.isdisjoint(half) and not live.isdisjoint(half) for half in map(np.ndarray.tolist, self.halves)
        )

    def _take_news(self) -> Outcome:
        answered, failures = self._answered, self._broken
        lanes = np.array(sorted([*answered, *(failure.lane for failure in failures)]), np.intp)
        rewards = self._running.rewards[lanes]
        if failures:
            rewards[np.isin(lanes, [failure.lane for failure in failures])] = 0.0
        self._show(answered)
        outcome = Outcome(rewards, self._ended, failures, self._infos, lanes=lanes)
        self._answered, self._ended, self._infos, self._broken = [], [], [], []
        return outcome

    def _show(self, lanes: Sequence[int]) -> None:
        for name, column in self._running.observations.items():
            self.observations.columns[name][lanes] = column[lanes]

    def _put_aside(self, answers: Replies, but: Container[int] = ()) -> None:
        stepped = [lane for lane in answers.stepped if lane in self._waiting]
        self._waiting.difference_update(stepped)
        wanted = set(stepped) - self._abandoned
        broken = [f for f in answers.failures if f.lane in self._waiting - self._abandoned]
        over = {failure.lane for failure in answers.failures}
        self._waiting -= over
        self._abandoned -= over | set(stepped)
        self._answered += [lane for lane in stepped if lane in wanted]
        self._ended += [(lane, end) for lane, end in answers.ended if lane in wanted]
        self._infos += [(lane, info) for lane, info in answers.infos if lane in wanted]
        self._broken += broken
        super()._put_aside(answers, but={failure.lane for failure in broken})

    # -- episodes -----------------------------------------------------------------------------------------------------

    def end_episodes(self, lanes: Sequence[int]) -> None:
        """See `Lanes`. A step that is under way for an episode which is abandoned was none."""
        self._abandoned |= self._waiting.intersection(lanes)
        if self._answered or self._broken:
            self._drop_news(set(lanes))
        super().end_episodes(lanes)

    def _drop_news(self, lanes: set[int]) -> None:
        self._answered = [lane for lane in self._answered if lane not in lanes]
        self._ended = [(lane, end) for lane, end in self._ended if lane not in lanes]
        self._infos = [(lane, info) for lane, info in self._infos if lane not in lanes]
        self._lost |= {failure.lane: failure for failure in self._broken if failure.lane in lanes}
        self._broken = [failure for failure in self._broken if failure.lane not in lanes]

    def _catch_up(self) -> None:
        """Await what is under way for nobody: a lane is reset when it has nothing else to do."""
        while self._abandoned:
            self._put_aside(self._hear())

    def _expect(self, index: int, episode: Episode) -> None:
        self._coming[index] = episode

    def _begin(self, lane: Any, episode: Episode, info: dict[str, Any]) -> None:
        super()._begin(lane, episode, info)
        self._show([lane.index])

    def try_render_at(self, index: int) -> NDArray[np.uint8] | None:
        """See `EnvDriver`; None too for an env that is being stepped."""
        return None if index in self._waiting else super().try_render_at(index)


class ReadyProcessVector(ReadyVector, ProcessVector):
    """Of envs in processes."""
