"""Stepping a vector of envs poll by poll, and keeping straight what became of every step of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.schemas.batch import ChunkBatch
from headrace.schemas.chunk import EXPLORE, RANDOM_ACTIONS
from headrace.schemas.ledger import Discard
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.cutting import Marker, Stamp, cut
from headrace.workers.envs.actions import to_env_form
from headrace.workers.envs.failures import Failure
from headrace.workers.envs.vector import EnvVector, Outcome
from headrace.workers.fragment import Fragment, OpenChunk
from headrace.workers.modules.acting import Columns
from headrace.workers.totals import RunnerTotals

_WAIT_SLICE_S = 0.02
"""How long to sleep at most before `on_wait` is called again while every env waits to be rebuilt."""


@dataclass(frozen=True, slots=True)
class Mode:
    """How actions are chosen; the same for all steps of a fragment."""

    explore: bool
    random_actions: bool

    @property
    def flags(self) -> int:
        """As they stand in the chunk table."""
        return EXPLORE * self.explore | RANDOM_ACTIONS * self.random_actions


class VectorSampler:
    """A vector, the fragment that is being filled, and the end markers that are to be told with the next cut."""

    def __init__(self, config: EnvRunnerConfig, envs: EnvVector, totals: RunnerTotals, id_high: int) -> None:
        self.envs = envs
        self.needs_reset = True
        self._totals = totals
        self._id_high = id_high
        self._keeps_infos = config.infos == "all"
        self._width = config.num_envs
        self._fragment: Fragment | None = None
        self._markers: list[Marker] = []
        self.mode = Mode(config.explore, random_actions=False)

    @property
    def fragment(self) -> Fragment:
        """The fragment that is being filled."""
        assert self._fragment is not None, "begin() opens a fragment"
        return self._fragment

    @property
    def episodes_ended(self) -> int:
        """Episodes that finished in the fragment."""
        return len(self.fragment.ended)

    def begin(self, mode: Mode, capacity: int, *, force_reset: bool) -> None:
        """Have a fragment for steps of this `mode`, and an episode in every env."""
        if self._fragment is not None and mode != self.mode:
            self._drop_fragment()  # columns and flags of a batch are of one mode
        self.mode = mode
        if self._fragment is None:
            self._fragment = Fragment(self._width, capacity, self.envs.observations.columns)
            self._resume_chunks()
        if force_reset or self.needs_reset:
            self.abandon(Discard.RESET)
            self.needs_reset = False
            self.envs.reset(range(self._width))
            self._start_episodes(self.envs.recover)

    def _resume_chunks(self) -> None:
        """Episodes go on in a new fragment; the info of the observation at the seam belongs to both chunks."""
        for lane in self.envs.lanes:
            if lane.episode is not None:
                self.fragment.begin(lane.index, lane.episode)
                if lane.episode.seam_info:
                    self.fragment.add_info(lane.index, lane.episode.seam_info)

    # -- one poll -----------------------------------------------------------------------------------------------------

    def poll(
        self,
        choose_actions: Callable[[], Columns],
        weights_seq: int,
        *,
        on_wait: Callable[[], None] | None = None,
        stop_at_episodes: int | None = None,
    ) -> None:
        """Step every env that is up, once, and begin the next episode where one ended.

        With `stop_at_episodes` none is begun once so many have ended. May sleep while no env is up at all. Raises what
        `EnvVector.recover` raises; the books are right even then, and the next poll goes on.
        """
        envs, fragment = self.envs, self.fragment
        if envs.live_count < self._width:
            self._await_envs(on_wait)
        fragment.aim(envs.live)
        columns = choose_actions()
        fragment.put(columns)
        outcome = envs.step(_env_actions(envs, columns))
        fragment.advance(outcome.rewards, weights_seq)
        self._count(outcome)
        for failure in outcome.failures:
            self._abort(failure)
        if self._keeps_infos:
            for lane, info in outcome.infos:
                fragment.add_info(lane, info)
        if outcome.ended:
            self._end_episodes(outcome, stop_at_episodes)
        if outcome.failures or outcome.ended:
            self._start_episodes(envs.recover)

    def _await_envs(self, on_wait: Callable[[], None] | None) -> None:
        """Bring back envs whose wait is over; while none at all is up, wait for the first."""
        self._start_episodes(self.envs.revive)
        while not self.envs.live_count:
            time.sleep(min(self.envs.next_due_s() or 0.0, _WAIT_SLICE_S))
            if on_wait is not None:
                on_wait()
            self._start_episodes(self.envs.revive)

    def _count(self, outcome: Outcome) -> None:
        stepped = len(outcome.rewards)
        self._totals.open += stepped
        self._totals.stepped += stepped - sum(not failure.stepped for failure in outcome.failures)

    def _abort(self, failure: Failure) -> None:
        """The env failed: its unfinished fragment is lost by name, and its episode over."""
        lost = self.fragment.abort(failure.lane)
        assert lost is not None, "only an env with an episode is stepped"
        episode, rows = lost
        failure.discarded = rows if failure.stepped else rows - 1
        failure.at = f"step {episode.steps + rows} of episode {self._id_high:016x}{episode.id_low:016x}"
        self._totals.open -= rows
        self._totals.discard(failure.reason, failure.discarded)
        if episode.chunks:
            self._markers.append(Marker(episode, failure.reason))
        self.envs.end_episodes([failure.lane])
        self.envs.fail(failure)

    def _end_episodes(self, outcome: Outcome, stop_at_episodes: int | None) -> None:
        self.fragment.end(outcome.ended)
        lanes = [lane for lane, _ in outcome.ended]
        self._totals.episodes += len(lanes)
        for lane in lanes:
            self.envs.lanes[lane].budget.delivered()
        self.envs.end_episodes(lanes)
        if stop_at_episodes is None or self.episodes_ended < stop_at_episodes:
            self.envs.reset(lanes)

    def _start_episodes(self, bring_back: Callable[[], None]) -> None:
        """Bring back failed envs, and open a chunk for each episode that has begun, also when bringing back raises."""
        try:
            bring_back()
        finally:
            for index in self.envs.take_started():
                episode = self.envs.lanes[index].episode
                if episode is not None:
                    self.fragment.begin(index, episode)
                    if episode.reset_info and self._keeps_infos:
                        self.fragment.add_info(index, episode.reset_info)

    # -- the end of a fragment ----------------------------------------------------------------------------------------

    def cut(
        self, learner_epoch: int, weights_digest: str, slot: int, incarnation: int, *, keep_open: bool = False
    ) -> tuple[Sequence[OpenChunk], ChunkBatch]:
        """What is to be delivered, as chunks and as the batch that begins with them; `keep_open`: whole episodes."""
        fragment, markers = self.fragment, self._markers
        chunks, self._fragment = fragment.take_chunks(keep_open=keep_open)
        self._markers = []
        stamp = Stamp(self._id_high, self.mode.flags, slot, incarnation, learner_epoch, weights_digest)
        batch = cut(fragment, chunks, markers, self.envs.spaces, stamp)
        self._totals.open -= batch.steps
        self._totals.delivered += batch.steps
        self._totals.delivered_chunks += len(batch)
        for chunk in chunks:
            self.envs.lanes[chunk.lane].budget.delivered()
            chunk.episode.seam_info = chunk.infos.get(chunk.stop - chunk.start)
        return chunks, batch

    def abandon(self, reason: Discard) -> None:
        """Every open episode is over: undelivered steps are lost by name, delivered parts get an end marker."""
        for lane in self.envs.lanes:
            episode = lane.episode
            if episode is None:
                continue
            lost = self._fragment.abort(lane.index) if self._fragment is not None else None
            if lost is not None:
                self._totals.open -= lost[1]
                self._totals.discard(reason, lost[1])
            if episode.chunks:
                self._markers.append(Marker(episode, reason))
        self.envs.end_episodes(range(len(self.envs.lanes)))
        self.needs_reset = True

    def finish(self, reason: Discard) -> None:
        """`abandon`, with a fragment for `cut` to deliver what had finished and to tell of the rest."""
        self.abandon(reason)
        if self._fragment is None:
            self._fragment = Fragment(self._width, 1, self.envs.observations.columns)

    def rebuild(self, config: EnvRunnerConfig) -> None:
        """Build all envs anew; steps that were not cut yet are lost, since spaces may be others now."""
        self._drop_fragment()
        self.envs.build(config)

    def _drop_fragment(self) -> None:
        self.abandon(Discard.RESET)
        ended = self._fragment.ended if self._fragment is not None else []
        self._markers += [Marker(chunk.episode, Discard.RESET) for chunk in ended if chunk.episode.chunks]
        self._totals.discard(Discard.RESET, self._totals.open)
        self._totals.open = 0
        self._fragment = None


def _env_actions(envs: EnvVector, columns: Columns) -> list[Any]:
    mapped = any(name.startswith("actions_for_env") for name in columns)
    return to_env_form(envs.spaces.action, columns, "actions_for_env" if mapped else "actions")
