"""Stepping a vector of envs poll by poll, and keeping straight what became of every step of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.batch import ChunkBatch
from headrace.schemas.chunk import ChunkEnd
from headrace.schemas.errors import ConnectorError
from headrace.schemas.ledger import Discard
from headrace.workers.callbacks import CallbackList
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.connectors.vector_connectors import VectorConnectors
from headrace.workers.cutting import Marker, Stamp, cut
from headrace.workers.envs.driver import EnvDriver
from headrace.workers.envs.failures import Failure
from headrace.workers.envs.lane import Episode, Lane
from headrace.workers.envs.stepping import Outcome
from headrace.workers.episode_events import EpisodeEvents
from headrace.workers.episode_starts import EpisodeStarts
from headrace.workers.episode_view import EpisodeView, OpenRows
from headrace.workers.fragment import Fragment, OpenChunk
from headrace.workers.mode import Mode
from headrace.workers.modules.acting import Columns
from headrace.workers.modules.recurrent import Memory
from headrace.workers.totals import RunnerTotals

_NO_STATE: dict[str, NDArray[Any]] = {}
"""One for all chunks: a dict for each, where episodes are many, makes the collector of garbage work more."""


ChooseActions = Callable[[NDArray[np.intp] | None], Columns]
"""The policy's columns, a row for every lane, of which those of some lanes (None: all) are meant."""

Process = Callable[[NDArray[np.intp] | None, Outcome, Columns], None]
"""Has what lanes (None: all) see pass env_to_module, with what came of the actions in the columns."""


class VectorSampler:
    """A vector, the fragment that is being filled, and the end markers that are to be told with the next cut."""

    def __init__(
        self, config: EnvRunnerConfig, envs: EnvDriver, totals: RunnerTotals, id_high: int, callbacks: CallbackList
    ) -> None:
        self.envs = envs
        self.needs_reset = True
        self._totals = totals
        self._id_high = id_high
        self._keeps_infos = config.infos == "all"
        self._width = config.num_envs
        self._horizon = config.episode_lookback_horizon
        self.connectors = _connect(config, envs)
        self._memory: Memory | None = None
        self._fragment: Fragment | None = None
        self._markers: list[Marker] = []
        self.mode = Mode(config.explore, random_actions=False)
        self.resets = 0
        """Times that a poll was no step for a lane, since its env used it for a reset."""
        self._events = EpisodeEvents(callbacks, self.look)
        self._start_episodes = EpisodeStarts(envs, self._events, self._open_chunks, self._abort)
        envs.on_episode_created = self._events.created if self._events.watches_created else None
        envs.on_failure = self._events.failed if self._events.watches_failures else None

    @property
    def fragment(self) -> Fragment:
        """The fragment that is being filled."""
        assert self._fragment is not None, "begin() opens a fragment"
        return self._fragment

    @property
    def episodes_ended(self) -> int:
        """Episodes that finished in the fragment."""
        return len(self.fragment.ended)

    @property
    def blocks(self) -> list[NDArray[np.intp]]:
        """Lanes of which all that can act do so together; none: whoever acts, a forward pass is of all lanes."""
        return []

    answered: int | None = None
    """Steps that came back, where a poll may step some lanes only; None where each steps all."""

    @property
    def hangs(self) -> bool:
        """Whether an action waits for the observation that completes it: each is answered by the step it is sent in."""
        return False

    def begin(self, mode: Mode, capacity: int, *, force_reset: bool) -> None:
        """Have a fragment for steps of this `mode`, and an episode in every env."""
        if self._fragment is not None and mode != self.mode:
            self._drop_fragment()  # columns and flags of a batch are of one mode
        self.mode = mode
        if self._fragment is None:
            room = capacity + capacity // 4 if self.envs.steps_to_reset else capacity
            self._fragment = self._new_fragment(room)
        self._resume_chunks()
        if force_reset or self.needs_reset:
            self.abandon(Discard.RESET)
            self.needs_reset = False
            self.envs.try_reset(range(self._width))
            self._start_episodes(self.envs.try_restart)

    def _new_fragment(self, capacity: int) -> Fragment:
        return Fragment(self._width, capacity, self.connectors.columns)

    def _resume_chunks(self) -> None:
        """Episodes go on in a new fragment; the info of the observation at the seam belongs to both chunks."""
        for lane in self.envs.lanes:
            episode = lane.episode
            if episode is not None and self.fragment.open[lane.index] is None:
                self.fragment.begin(lane.index, episode, self._state_in(lane.index))
                info = episode.seam_info if episode.chunks else episode.reset_info
                if info and self._keeps_infos:
                    self.fragment.add_info(lane.index, info)

    def _state_in(self, lane: int) -> dict[str, NDArray[Any]]:
        """What a recurrent module, if there is one and it acts, remembers of the lane."""
        return _NO_STATE if self._memory is None or self.mode.random_actions else self._memory.of(lane)

    def use_memory(self, memory: Memory | None) -> None:
        """From now on `memory` is kept true at episode starts. Steps that were not cut yet, of another's, are lost."""
        if (memory is not None or self._memory is not None) and self._fragment is not None:
            self._drop_fragment()
        self._memory = memory

    # -- one poll -----------------------------------------------------------------------------------------------------

    def poll(
        self,
        choose_actions: ChooseActions,
        weights_seq: int,
        *,
        on_wait: Callable[[], None] | None = None,
        stop_at_episodes: int | None = None,
    ) -> None:
        """Step every env that is up, once, and begin the next episode where one ended.

        With `stop_at_episodes` none is begun once so many have ended. May sleep while no env is up at all. Raises what
        `EnvDriver.try_restart` raises; the books are right even then, and the next poll goes on.
        """
        self._repair(on_wait)
        envs, fragment, live = self.envs, self.fragment, self.envs.live
        choose_actions, poll, process = self._timed(choose_actions)
        fragment.aim(live)
        columns = self._choose(choose_actions, None)
        fragment.put(columns)
        envs.send_actions(columns)
        outcome = poll()
        fragment.advance(outcome.rewards, weights_seq)
        self.resets += outcome.resets
        self._take_in(outcome, live, columns, process, stop_at_episodes)

    def _repair(self, on_wait: Callable[[], None] | None) -> None:
        """Bring back what may be brought back; waits while no env is up at all."""
        self.envs.on_wait = on_wait
        if self.envs.repairing:
            self.envs.wait_for_one(self._start_episodes, on_wait)

    def _timed(self, choose_actions: ChooseActions) -> tuple[ChooseActions, Callable[[], Outcome], Process]:
        """What a poll calls, in the order in which it does; timed if it is this poll's turn."""
        poll, process, timers = self.envs.poll, self._process, self._totals.timers
        if timers.is_due():
            poll, process = timers.timed("env_step_timer", poll), timers.timed("env_to_module_timer", process)
            if not self.mode.random_actions:
                choose_actions = timers.timed("rlmodule_inference_timer", choose_actions)
        return choose_actions, poll, process

    def _choose(self, choose_actions: ChooseActions, acting: NDArray[np.intp] | None) -> Columns:
        try:
            return choose_actions(acting)
        except ConnectorError:
            if self._memory is not None:
                self._drop_fragment()  # it remembers a step that will not be taken
            raise

    def _take_in(
        self,
        outcome: Outcome,
        lanes: NDArray[np.intp] | None,
        columns: Columns,
        process: Process,
        stop_at_episodes: int | None,
    ) -> None:
        """What came of the actions in `columns` (width, ...) of `lanes` (None: all); rewards stand in the fragment."""
        self._count(outcome)
        for failure in outcome.failures:
            self._abort(failure)
        if self.connectors.sees:
            process(lanes, outcome, columns)
        if self._keeps_infos:
            for lane, info in outcome.infos:
                self.fragment.add_info(lane, info)
        if self._events.watches_steps or (outcome.ended and self._events.watches_ends):
            self._tell_steps(outcome)
        if outcome.ended:
            self._end_episodes(outcome, stop_at_episodes)
        if outcome.failures or outcome.ended or outcome.begun:
            self._start_episodes(self.envs.try_restart)

    def _process(self, stepped: NDArray[np.intp] | None, outcome: Outcome, columns: Columns) -> None:
        """The observations that have arrived pass env_to_module, those of episodes that end with them too."""
        lanes = np.arange(self._width) if stepped is None else stepped
        rewards = outcome.rewards
        if outcome.failures:
            sound = ~np.isin(lanes, [failure.lane for failure in outcome.failures])
            lanes, rewards = lanes[sound], rewards[sound]
        if len(lanes):
            with self._dropping():
                chosen = {name: columns[name][lanes] for name in self.connectors.actions}
                self.connectors.stepped(lanes, chosen, rewards)

    @contextmanager
    def _dropping(self) -> Iterator[None]:
        """Where a connector fails between two polls, nobody knows what its lanes have seen: all begin anew."""
        try:
            yield
        except ConnectorError:
            self._drop_fragment()
            raise

    def _tell_steps(self, outcome: Outcome) -> None:
        """Callbacks of steps and ends; one that raises makes a failure of its lane."""
        ends = dict(outcome.ended)
        stepped = self.envs.lanes if outcome.lanes is None else [self.envs.lanes[i] for i in outcome.lanes.tolist()]
        lanes = stepped if self._events.watches_steps else [self.envs.lanes[index] for index in ends]
        for lane in lanes:
            if lane.episode is None:
                continue
            error = self._events.stepped(lane, lane.episode, ends.get(lane.index, ChunkEnd.ONGOING))
            if error is not None:
                ends.pop(lane.index, None)
                outcome.failures.append(Failure(lane.index, error, stepped=True))
                self._abort(outcome.failures[-1])
        outcome.ended = list(ends.items())

    def look(self, lane: Lane, episode: Episode, *, undone: bool = False) -> EpisodeView:
        """How `episode` of the lane stands now, without its last row if that was `undone`."""
        chunk = self._fragment.open[lane.index] if self._fragment is not None else None
        if chunk is None or chunk.episode is not episode:
            return EpisodeView(episode, self._id_high, self.connectors.spaces)
        stop = self.fragment.cursor(lane.index) - undone
        columns = self.fragment.columns
        rows = OpenRows(columns, self.connectors.columns, chunk.infos, lane.index, chunk.start, stop)
        return EpisodeView(episode, self._id_high, self.connectors.spaces, rows)

    def _count(self, outcome: Outcome) -> None:
        stepped = len(outcome.rewards)
        self._totals.open += stepped
        self._totals.stepped += stepped - sum(not failure.stepped for failure in outcome.failures)
        self._totals.env_steps = self._totals.stepped

    def _abort(self, failure: Failure) -> None:
        """The env or a callback failed: its unfinished fragment is lost by name, and its episode over."""
        lane = self.envs.lanes[failure.lane]
        if self._events.watches_failures and lane.episode is not None:
            failure.view = self.look(lane, lane.episode, undone=not failure.stepped)
            self._events.aborted(failure.view, failure.reason)
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
        now = time.perf_counter()
        for lane in map(self.envs.lanes.__getitem__, lanes):
            lane.budget.delivered()
            if lane.episode is not None:
                lane.episode.ended_at = now
        self.envs.end_episodes(lanes)
        if stop_at_episodes is None or self.episodes_ended < stop_at_episodes:
            self._totals.timers.timed("env_reset_timer", self.envs.try_reset)(lanes)

    def _open_chunks(self, started: Sequence[Lane]) -> None:
        indices = [lane.index for lane in started]
        with self._dropping():
            self.connectors.started(indices)
        if self._memory is not None:
            self._memory.reset(indices)
        for lane in started:
            assert lane.episode is not None, "only lanes with an episode have started"
            self.fragment.begin(lane.index, lane.episode, self._state_in(lane.index))
            if lane.episode.reset_info and self._keeps_infos:
                self.fragment.add_info(lane.index, lane.episode.reset_info)

    # -- the end of a fragment ----------------------------------------------------------------------------------------

    def cut(
        self, learner_epoch: int, weights_digest: str, slot: int, incarnation: int, *, keep_open: bool = False
    ) -> tuple[Sequence[OpenChunk], ChunkBatch]:
        """What is to be delivered, as chunks and as the batch that begins with them; `keep_open`: whole episodes."""
        fragment, markers = self.fragment, self._markers
        chunks, self._fragment = self._take_chunks(keep_open)
        self._markers = []
        stamp = Stamp(self._id_high, self.mode.flags, slot, incarnation, learner_epoch, weights_digest, self._horizon)
        batch = cut(fragment, chunks, markers, self.connectors.spaces, stamp)
        self._totals.open -= batch.steps
        self._totals.delivered += batch.steps
        self._totals.env_steps_delivered = self._totals.delivered
        self._totals.delivered_chunks += len(batch)
        for chunk in chunks:
            self.envs.lanes[chunk.lane].budget.delivered()
            chunk.episode.seam_info = chunk.infos.get(chunk.stop - chunk.start)
        return chunks, batch

    def _take_chunks(self, keep_open: bool) -> tuple[list[OpenChunk], Fragment | None]:
        return self.fragment.take_chunks(keep_open=keep_open)

    def abandon(self, reason: Discard) -> None:
        """Every open episode is over: undelivered steps are lost by name, delivered parts get an end marker."""
        for lane in self.envs.lanes:
            episode = lane.episode
            if episode is None:
                continue
            if self._events.watches_failures:
                self._events.aborted(self.look(lane, episode), reason)
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
            self._fragment = self._new_fragment(1)

    def rebuild(self, config: EnvRunnerConfig) -> None:
        """Build all envs anew; steps that were not cut yet are lost, since spaces may be others now."""
        self._drop_fragment()
        self.envs.build(config)
        known = self.connectors.get_state()
        self.connectors = _connect(config, self.envs)
        if self.connectors.fits(known):
            self.connectors.set_state(known)

    def close(self) -> None:
        """Close all envs."""
        self.envs.stop()

    def _drop_fragment(self) -> None:
        self.abandon(Discard.RESET)
        ended = self._fragment.ended if self._fragment is not None else []
        self._markers += [Marker(chunk.episode, Discard.RESET) for chunk in ended if chunk.episode.chunks]
        self._totals.discard(Discard.RESET, self._totals.open)
        self._totals.open = 0
        self._fragment = None


def _connect(config: EnvRunnerConfig, envs: EnvDriver) -> VectorConnectors:
    return VectorConnectors(config.env_to_module, config.module_to_env, envs.spaces, envs.observations.columns)
