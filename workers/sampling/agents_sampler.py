"""Stepping a vector of multi-agent envs poll by poll: who acts, what that begins and ends, and who is told of it."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ParamSpec, TypeVar, cast

from headrace.schemas.chunk import ChunkEnd
from headrace.schemas.errors import ConnectorError, HeadraceError, ModuleError
from headrace.schemas.ledger import Discard
from headrace.workers.agents.episodes import MultiAgentEpisode
from headrace.workers.agents.step_outcome import StepOutcome
from headrace.workers.agents.turn import Part, Turn
from headrace.workers.agents.vector import MultiAgentVector as AgentSeats
from headrace.workers.agents.vector import MultiAgentVector as MultiAgentLanes
from headrace.workers.callbacks import CallbackList
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.actions import to_env_form
from headrace.workers.envs.failures import Failure
from headrace.workers.envs.lane import Lane
from headrace.workers.metrics.totals import RunnerTotals
from headrace.workers.policy.acting import Columns
from headrace.workers.policy.module_seats import ModuleSeats
from headrace.workers.policy.policies import PolicyMappingError
from headrace.workers.sampling.agent_views import MultiAgentEpisodeView
from headrace.workers.sampling.episode_events import EpisodeEvents
from headrace.workers.sampling.episode_starts import EpisodeStarts
from headrace.workers.sampling.mode import Mode
from headrace.workers.sampling.open_chunks import OpenChunks

P = ParamSpec("P")
R = TypeVar("R")


class MultiAgentSampler(ABC):
    """A vector, and in `chunks` what its agents lived through and no cut has delivered yet."""

    def __init__(
        self,
        config: EnvRunnerConfig,
        envs: AgentSeats,
        totals: RunnerTotals,
        id_high: int,
        callbacks: CallbackList,
    ) -> None:
        self.envs = envs
        self.chunks = OpenChunks(config, envs, totals, id_high)
        self.needs_reset = True
        self._totals = totals
        self._id_high = id_high
        self._width = config.num_envs
        self._events = EpisodeEvents(callbacks, self.look)
        refuse = partial(self._abort, recorded=True)
        self._start_episodes = EpisodeStarts(envs, self._events, self._open_chunks, refuse)
        envs.on_episode_created = self._events.created if self._events.watches_created else None
        envs.on_failure = self._events.failed if self._events.watches_failures else None

    @property
    def mode(self) -> Mode:
        """That of the open chunks."""
        return self.chunks.mode

    @property
    def modules(self) -> Iterable[ModuleSeats]:
        return self.envs.modules.values()

    @property
    def episodes_ended(self) -> int:
        """Episodes that finished since the last cut, and will be delivered."""
        return sum(episode.trains for episode in self.chunks.over)

    answered: int | None = None
    resets = 0
    """No poll is a reset only: an env that has ended its episode is reset between two."""
    resets_envs = True

    @property
    def is_overdue(self) -> bool:
        """See `Sampler`: never, where envs are stepped."""
        return False

    @property
    def hangs(self) -> bool:
        """Whether an action waits for the observation that completes it."""
        return any(seat.hangs for episode in self.chunks.episodes for seat in episode.seats.values())

    def look(self, lane: Lane, episode: MultiAgentEpisode) -> MultiAgentEpisodeView:
        """How `episode` of the lane stands now."""
        return MultiAgentEpisodeView(episode, self._id_high)

    def running(self) -> list[MultiAgentEpisodeView]:
        """How all that go on stand, by env."""
        return [MultiAgentEpisodeView(episode, self._id_high) for episode in self.chunks.episodes]

    def begin(self, mode: Mode, capacity: int, *, force_reset: bool) -> None:
        """Have fragments for steps of this `mode`, and an episode in every env. Raises `PolicyMappingError`."""
        if mode != self.mode and self.chunks.has_fragments:
            self._drop_fragments()  # columns and flags of a batch are of one mode
        self.chunks.resume(mode, capacity)
        if force_reset or self.needs_reset:
            self.abandon(Discard.RESET)
            self.needs_reset = False
            try:
                self.envs.try_reset(range(self._width))
                self._start_episodes(self.envs.try_restart)
            except (PolicyMappingError, ConnectorError) as error:
                self._begin_anew(error)
                raise

    def use(self, modules: Mapping[str, Any], count_steps: Callable[[], int]) -> None:
        """Act with `modules`; for `count_steps` see `Actor`.

        Steps that were not cut yet are lost where any module remembers, for it begins anew.
        """
        remembers = any(module.memory is not None for module in self.modules)
        for module_id, module in modules.items():
            self.envs.modules[module_id].use(module, count_steps)
        remembers = remembers or any(module.memory is not None for module in self.modules)
        if remembers and self.chunks.has_fragments:
            self._drop_fragments()

    # -- one poll -----------------------------------------------------------------------------------------------------

    def poll(
        self, weights_seq: int, *, on_wait: Callable[[], None] | None = None, stop_at_episodes: int | None = None
    ) -> None:
        """Step every env that is up, once; see `VectorSampler.poll`. Raises `PolicyMappingError` besides."""
        try:
            self._poll(weights_seq, on_wait, stop_at_episodes)
        except (PolicyMappingError, ConnectorError, ModuleError) as error:
            self._begin_anew(error)
            raise

    def _begin_anew(self, error: HeadraceError) -> None:
        """Some agents were stepped, reset or seen by a connector before the `error`, and others not."""
        if isinstance(error, PolicyMappingError):
            self.abandon(Discard.RESET)
        elif isinstance(error, ConnectorError) or any(module.memory is not None for module in self.modules):
            self._drop_fragments()  # a module that remembers may do so of a step which will not be taken

    @abstractmethod
    def _poll(self, weights_seq: int, on_wait: Callable[[], None] | None, stop_at_episodes: int | None) -> None:
        """See `poll`."""

    def _repair(self, on_wait: Callable[[], None] | None) -> None:
        self.envs.on_wait = on_wait
        if self.envs.repairing:
            self.envs.wait_for_one(self._start_episodes, on_wait)

    def _timed(self, step: Callable[P, R]) -> tuple[Callable[[Turn, int], list[Any]], Callable[P, R]]:
        """What acts, and `step`; timed in one poll of many."""
        act, timers = self._act, self._totals.timers
        if timers.is_due():
            step = timers.timed("env_step_timer", step)
            if not self.mode.random_actions:
                act = timers.timed("rlmodule_inference_timer", act)
        return act, step

    def _take_in(self, turn: Turn, outcome: StepOutcome, stop_at_episodes: int | None) -> None:
        """What came of the step of the lanes of `turn`."""
        self.chunks.count(turn, outcome)
        for failure in outcome.failures:
            self._abort(failure)
        self.chunks.record(outcome)
        if self._events.watches_steps or (outcome.over and self._events.watches_ends):
            self._tell_steps(turn, outcome)
        self.chunks.end(outcome.ended)
        if outcome.over:
            self._end_episodes(outcome.over, stop_at_episodes)
        if outcome.failures or outcome.over:
            self._start_episodes(self.envs.try_restart)

    def _act(self, turn: Turn, weights_seq: int) -> list[Any]:
        """Each module acts once for all its seats; actions in the order of the turn's."""
        actions: list[Any] = [None] * len(turn.seats)
        for part in turn.parts:
            module, rows = part.module, part.rows
            columns = self._choose(turn, part)
            assert module.fragment is not None, "begin() opens fragments"
            module.fragment.act_at(rows, columns, weights_seq, part.of_array(turn.env_t))
            root = "actions_for_env" if any(name.startswith("actions_for_env") for name in columns) else "actions"
            sent = {name: column[rows] for name, column in columns.items() if name.startswith(root)}
            formed = to_env_form(module.env_spaces.action, sent, root)
            if part.places is None:
                return formed
            for place, action in zip(part.places.tolist(), formed, strict=True):
                actions[place] = action
        return actions

    def _choose(self, turn: Turn, part: Part) -> Columns:
        """What the module of `part` has its seats do, in columns with a row for each of its seats."""
        return part.module.act(part.rows, explore=self.mode.explore, random_actions=self.mode.random_actions)

    def _tell_steps(self, turn: Turn, outcome: StepOutcome) -> None:
        """Callbacks of steps and ends; one that raises makes a failure of its lane."""
        for lane, episode in turn.lanes:
            end = outcome.over.get(lane.index, ChunkEnd.ONGOING)
            is_told = self._events.watches_steps or end is not ChunkEnd.ONGOING
            error = self._events.stepped(lane, episode, end) if is_told and lane.episode is episode else None
            if error is not None:
                outcome.over.pop(lane.index, None)
                outcome.ended = [(seat, own) for seat, own in outcome.ended if seat.episode.whole is not episode]
                outcome.failures.append(Failure(lane.index, error, stepped=True))
                self._abort(outcome.failures[-1], recorded=True)

    # -- episodes that end, fail and begin ----------------------------------------------------------------------------

    def _end_episodes(self, lanes: Collection[int], stop_at_episodes: int | None) -> None:
        now = time.perf_counter()
        for index in lanes:
            lane = self.envs.lanes[index]
            assert isinstance(lane.episode, MultiAgentEpisode)
            lane.episode.ended_at = now
            self.chunks.end_episode(lane.episode)
            lane.budget.delivered()
        self._totals.episodes += len(lanes)
        self.envs.end_episodes(list(lanes))
        if stop_at_episodes is None or self.episodes_ended < stop_at_episodes:
            self._totals.timers.timed("env_reset_timer", self.envs.try_reset)(list(lanes))

    def _abort(self, failure: Failure, *, recorded: bool = False) -> None:
        """The env or a callback failed: the open chunks of all its agents are lost by name, and its episode is over.

        `recorded` says that the last step stands in the chunks already.
        """
        lane = self.envs.lanes[failure.lane]
        episode = lane.episode
        assert isinstance(episode, MultiAgentEpisode), "only an env with an episode is stepped"
        if self._events.watches_failures:
            failure.view = self.look(lane, episode).lasting()
            self._events.aborted(failure.view, failure.reason)
        self.chunks.lose(failure, episode, recorded=recorded)
        self.envs.end_episodes([failure.lane])
        self.envs.fail(failure)

    def _open_chunks(self, started: Sequence[Lane]) -> None:
        """For each agent that has begun."""
        episodes = [cast(MultiAgentEpisode, lane.episode) for lane in started]
        self.chunks.begin([seat for episode in episodes for seat in episode.acting])
        for episode in episodes:
            for seat in episode.acting:
                if seat.agent in episode.reset_info:
                    self.chunks.take_info(seat, episode.reset_info[seat.agent])

    # -- when all begins anew, or ends --------------------------------------------------------------------------------

    def abandon(self, reason: Discard) -> None:
        """Every open episode is over: undelivered steps are lost by name, delivered parts get an end marker.

        That holds for agents that were done in an episode that was not, too.
        """
        if self._events.watches_failures:
            for episode in self.chunks.episodes:
                self._events.aborted(self.look(self.envs.lanes[episode.env_index], episode), reason)
        self.chunks.lose_all(reason)
        self.envs.end_episodes(range(len(self.envs.lanes)))
        self.needs_reset = True

    def finish(self, reason: Discard) -> None:
        """`abandon`, with fragments for `cut` to deliver what had finished and to tell of the rest."""
        self.abandon(reason)
        self.chunks.open_fragments(1)

    def rebuild(self, config: EnvRunnerConfig) -> None:
        """Build all envs anew; steps that were not cut yet are lost, since spaces may be others now."""
        self._drop_fragments()
        before = dict(self.envs.modules)
        self.envs.build(config)
        for module in self.modules:
            if module.module_id in before:
                module.take_over(before[module.module_id])

    def close(self) -> None:
        """Close all envs."""
        self.envs.stop()

    def _drop_fragments(self) -> None:
        self.abandon(Discard.RESET)
        self.chunks.lose_over(Discard.RESET)


class LockStepAgentsSampler(MultiAgentSampler):
    """One of which each poll steps every env that is up."""

    envs: MultiAgentLanes

    def __init__(
        self,
        config: EnvRunnerConfig,
        envs: MultiAgentLanes,
        totals: RunnerTotals,
        id_high: int,
        callbacks: CallbackList,
    ) -> None:
        super().__init__(config, envs, totals, id_high, callbacks)

    def _poll(self, weights_seq: int, on_wait: Callable[[], None] | None, stop_at_episodes: int | None) -> None:
        self._repair(on_wait)
        act, step = self._timed(self.envs.step)
        turn = self.envs.turn()
        self._take_in(turn, step(turn, act(turn, weights_seq)), stop_at_episodes)
