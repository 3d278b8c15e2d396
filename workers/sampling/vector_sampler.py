"""Stepping a vector of envs poll by poll, and keeping straight what became of every step of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.chunk import ChunkEnd
from headrace.schemas.errors import ConnectorError
from headrace.schemas.ledger import Discard
from headrace.workers.callbacks import CallbackList
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.driver import EnvDriver
from headrace.workers.envs.failures import Failure
from headrace.workers.envs.lane import Lane
from headrace.workers.envs.stepping import Outcome
from headrace.workers.metrics.totals import RunnerTotals
from headrace.workers.policy.acting import Columns
from headrace.workers.sampling.cutting import Marker
from headrace.workers.sampling.episode_starts import EpisodeStarts
from headrace.workers.sampling.gathering import Gathering, connect
from headrace.workers.sampling.mode import Mode

ChooseActions = Callable[[NDArray[np.intp] | None], Columns]
"""The policy's columns, a row for every lane, of which those of some lanes (None: all) are meant."""

Process = Callable[[NDArray[np.intp] | None, Outcome, Columns], None]
"""Has what lanes (None: all) see pass env_to_module, with what came of the actions in the columns."""


class VectorSampler(Gathering):
    """A `Gathering` that steps its vector, and keeps straight what a step begins, ends and takes away."""

    def __init__(
        self, config: EnvRunnerConfig, envs: EnvDriver, totals: RunnerTotals, id_high: int, callbacks: CallbackList
    ) -> None:
        super().__init__(config, envs, totals, id_high, callbacks)
        self.resets = 0
        """Times that a poll was no step for a lane, since its env used it for a reset."""
        self._start_episodes = EpisodeStarts(envs, self._events, self._open_chunks, self._abort)
        envs.on_episode_created = self._events.created if self._events.watches_created else None
        envs.on_failure = self._events.failed if self._events.watches_failures else None

    @property
    def blocks(self) -> list[NDArray[np.intp]]:
        """Lanes of which all that can act do so together; none: whoever acts, a forward pass is of all lanes."""
        return []

    answered: int | None = None
    """Steps that came back, where a poll may step some lanes only; None where each steps all."""

    resets_envs = True

    @property
    def is_overdue(self) -> bool:
        """See `Sampler`: never, where envs are stepped."""
        return False

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

    def _count(self, outcome: Outcome) -> None:
        totals, stepped = self._totals, len(outcome.rewards)
        totals.open += stepped
        totals.stepped += stepped
        if outcome.failures:
            totals.stepped -= sum(not failure.stepped for failure in outcome.failures)
        totals.env_steps = totals.stepped

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

    def rebuild(self, config: EnvRunnerConfig) -> None:
        """Build all envs anew; steps that were not cut yet are lost, since spaces may be others now."""
        self._drop_fragment()
        self.envs.build(config)
        known = self.connectors.get_state()
        self.connectors = connect(config, self.envs)
        if self.connectors.fits(known):
            self.connectors.set_state(known)

    def close(self) -> None:
        """Close all envs."""
        self.envs.stop()
