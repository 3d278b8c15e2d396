"""Stepping a vector of multi-agent envs poll by poll, and keeping straight what became of every agent's step.

An agent step counts when the env has taken the action. It stands open, hanging or in a row, until a cut delivers it or
it is lost by name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from numpy.typing import NDArray

from headrace.schemas.batch import ChunkBatch
from headrace.schemas.chunk import ChunkEnd
from headrace.schemas.errors import ConnectorError, HeadraceError, ModuleError
from headrace.schemas.ledger import Discard
from headrace.workers.action_masks import MASK
from headrace.workers.callbacks import CallbackList
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.cutting import Marker, Stamp
from headrace.workers.envs.actions import to_env_form
from headrace.workers.envs.failures import Failure
from headrace.workers.envs.lane import Lane
from headrace.workers.episode_events import EpisodeEvents
from headrace.workers.fragment import OpenChunk
from headrace.workers.multi_agent.batches import ModuleBatches
from headrace.workers.multi_agent.cutting import cut_seats
from headrace.workers.multi_agent.episodes import AgentEpisode, MultiAgentEpisode, Seat
from headrace.workers.multi_agent.fragment import SeatFragment
from headrace.workers.multi_agent.losses import LossCounts, lose_ended, lose_episode
from headrace.workers.multi_agent.module_seats import ModuleSeats
from headrace.workers.multi_agent.policies import PolicyMappingError
from headrace.workers.multi_agent.turns import Turn, parts_of
from headrace.workers.multi_agent.vector import MultiAgentVector, StepOutcome
from headrace.workers.multi_agent.views import MultiAgentEpisodeView
from headrace.workers.totals import RunnerTotals
from headrace.workers.vector_sampler import Mode


class MultiAgentSampler:
    """A vector, and for each module the fragment that is being filled and the end markers to be told with it."""

    def __init__(
        self,
        config: EnvRunnerConfig,
        envs: MultiAgentVector,
        totals: RunnerTotals,
        id_high: int,
        callbacks: CallbackList,
    ) -> None:
        self.envs = envs
        self.needs_reset = True
        self.losses = LossCounts()
        self.mode = Mode(config.explore, random_actions=False)
        self._totals = totals
        self._id_high = id_high
        self._keeps_infos = config.infos == "all"
        self._width = config.num_envs
        self._horizon = config.episode_lookback_horizon
        self._over: list[MultiAgentEpisode] = []
        """Episodes that ended since the last cut."""
        self.observed_more: dict[tuple[str, str], int] = {}
        """(agent, module) -> how many more observations than actions the last cut delivered."""
        self._events = EpisodeEvents(callbacks, self.look)
        envs.on_episode_created = self._events.created if self._events.watches_created else None
        envs.on_failure = self._events.failed if self._events.watches_failures else None

    @property
    def modules(self) -> Iterable[ModuleSeats]:
        return self.envs.modules.values()

    @property
    def episodes_ended(self) -> int:
        """Episodes that finished since the last cut."""
        return len(self._over)

    resets = 0
    """No poll is a reset only: an env that has ended its episode is reset between two."""

    @property
    def hangs(self) -> bool:
        """Whether an action waits for the observation that completes it."""
        return any(seat.hangs for episode in self._episodes() for seat in episode.seats.values())

    def _episodes(self) -> Iterator[MultiAgentEpisode]:
        return (lane.episode for lane in self.envs.lanes if isinstance(lane.episode, MultiAgentEpisode))

    def look(self, lane: Lane, episode: MultiAgentEpisode) -> MultiAgentEpisodeView:
        """How `episode` of the lane stands now."""
        return MultiAgentEpisodeView(episode, self._id_high)

    def running(self) -> list[MultiAgentEpisodeView]:
        """How all that go on stand, by env."""
        return [MultiAgentEpisodeView(episode, self._id_high) for episode in self._episodes()]

    def begin(self, mode: Mode, capacity: int, *, force_reset: bool) -> None:
        """Have fragments for steps of this `mode`, and an episode in every env. Raises `PolicyMappingError`."""
        if mode != self.mode and any(module.fragment is not None for module in self.modules):
            self._drop_fragments()  # columns and flags of a batch are of one mode
        self.mode = mode
        for module in self.modules:
            module.open_fragment(capacity)
        self._resume_chunks()
        if force_reset or self.needs_reset:
            self.abandon(Discard.RESET)
            self.needs_reset = False
            try:
                self.envs.try_reset(range(self._width))
                self._start_episodes(self.envs.try_restart)
            except (PolicyMappingError, ConnectorError) as error:
                self._begin_anew(error)
                raise

    def _resume_chunks(self) -> None:
        """Agents go on in new fragments; the info of the observation at the seam belongs to both chunks."""
        for episode in self._episodes():
            for seat in episode.seats.values():
                fragment = seat.fragment
                if not seat.done and fragment.open[seat.row] is None:
                    fragment.begin(seat.row, seat.episode, self._state_in(seat))
                    if seat.episode.seam_info:
                        fragment.add_info(seat.row, seat.episode.seam_info)

    def _state_in(self, seat: Seat) -> dict[str, NDArray[Any]]:
        return {} if self.mode.random_actions else seat.module.state_in(seat.row, hangs=seat.hangs)

    def use(self, modules: Mapping[str, Any], count_steps: Callable[[], int]) -> None:
        """Act with `modules`; for `count_steps` see `Actor`.

        Steps that were not cut yet are lost where any module remembers, for it begins anew.
        """
        remembers = any(module.memory is not None for module in self.modules)
        for module_id, module in modules.items():
            self.envs.modules[module_id].use(module, count_steps)
        remembers = remembers or any(module.memory is not None for module in self.modules)
        if remembers and any(module.fragment is not None for module in self.modules):
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

    def _poll(self, weights_seq: int, on_wait: Callable[[], None] | None, stop_at_episodes: int | None) -> None:
        envs = self.envs
        if envs.live_count < self._width:
            envs.wait_for_one(self._start_episodes, on_wait)
        turn = envs.turn()
        act, step, timers = self._act, envs.step, self._totals.timers
        if timers.is_due():
            step = timers.timed("env_step_timer", step)
            if not self.mode.random_actions:
                act = timers.timed("rlmodule_inference_timer", act)
        outcome = step(turn, act(turn, weights_seq))
        self._count(turn, outcome)
        for failure in outcome.failures:
            self._abort(failure)
        self._record(outcome)
        if self._events.watches_steps or (outcome.over and self._events.watches_ends):
            self._tell_steps(turn, outcome)
        for part in parts_of([seat for seat, _ in outcome.ended]):
            self._end_seats(part.module, part.of(outcome.ended))
        if outcome.over:
            self._end_episodes(outcome.over, stop_at_episodes)
        if outcome.failures or outcome.over:
            self._start_episodes(envs.try_restart)

    def _act(self, turn: Turn, weights_seq: int) -> list[Any]:
        """Each module acts once for all its seats; actions in the order of the turn's."""
        actions: list[Any] = [None] * len(turn.seats)
        for part in turn.parts:
            module, rows = part.module, part.rows
            columns = module.act(rows, explore=self.mode.explore, random_actions=self.mode.random_actions)
            assert module.fragment is not None, "begin() opens fragments"
            module.fragment.act(rows, columns, weights_seq, part.of_array(turn.env_t))
            root = "actions_for_env" if any(name.startswith("actions_for_env") for name in columns) else "actions"
            sent = {name: column[rows] for name, column in columns.items() if name.startswith(root)}
            formed = to_env_form(module.env_spaces.action, sent, root)
            if part.places is None:
                return formed
            for place, action in zip(part.places.tolist(), formed, strict=True):
                actions[place] = action
        return actions

    def _count(self, turn: Turn, outcome: StepOutcome) -> None:
        raised = [failure.lane for failure in outcome.failures if not failure.stepped]
        untaken = sum(len(episode.acting) for lane, episode in turn.lanes if lane.index in raised) if raised else 0
        self._totals.stepped += len(turn.seats) - untaken
        self._totals.open += len(turn.seats) - untaken
        self._totals.env_steps += len(turn.lanes) - len(raised)

    def _record(self, outcome: StepOutcome) -> None:
        for part in parts_of(outcome.answered):
            unseen = [seat.row for seat in outcome.unseen if seat.module is part.module] if outcome.unseen else ()
            part.module.answer(part.rows, part.of_array(outcome.rewards), unseen)
        if outcome.newcomers:
            self._begin_seats(outcome.newcomers)
        for seat, info in outcome.infos:
            self._take_info(seat, info)
        for seat in outcome.dropped:
            self._totals.open -= 1
            self._totals.discard(Discard.ENV_BAD_DATA, 1, env_steps=0)
            self.losses.final_steps_dropped += 1
            self.losses.lose(seat.reward)
            seat.hangs, seat.reward = False, 0.0
        self.losses.final_observations_repeated += outcome.repeated

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

    def _end_seats(self, module: ModuleSeats, ended: Any) -> None:
        assert module.fragment is not None
        for seat, _ in ended:
            chunk = module.fragment.open[seat.row]
            is_empty = chunk is not None and module.fragment.cursor(seat.row) == chunk.start
            if is_empty and seat.episode.chunks:  # its last step was dropped, and it was the only one
                module.markers.append(Marker(seat.episode, Discard.ENV_BAD_DATA))
        module.fragment.end([(seat.row, end) for seat, end in ended])

    def _take_info(self, seat: Seat, info: dict[str, Any]) -> None:
        """The info that came with what the seat sees now; one that came without an observation is nobody's."""
        if seat.hangs:
            return
        if MASK in info and not seat.done:
            seat.module.random.tell(seat.row, info[MASK])
        if self._keeps_infos:
            seat.fragment.add_info(seat.row, info)

    # -- episodes that end, fail and begin ----------------------------------------------------------------------------

    def _end_episodes(self, lanes: Collection[int], stop_at_episodes: int | None) -> None:
        for index in lanes:
            lane = self.envs.lanes[index]
            assert isinstance(lane.episode, MultiAgentEpisode)
            for reward in lane.episode.early_rewards.values():
                self.losses.lose(reward)
            self._over.append(lane.episode)
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
        unrecorded = [] if recorded else episode.acting
        lost = lose_episode(episode, failure.reason, unrecorded) + len(unrecorded) * failure.stepped
        failure.discarded = lost
        failure.at = f"step {episode.t + (not failure.stepped)} of episode {self._id_high:016x}{episode.id_low:016x}"
        self._totals.open -= lost
        self._totals.discard(failure.reason, lost, episode.t - episode.t_cut)
        self.envs.end_episodes([failure.lane])
        self.envs.fail(failure)

    def _start_episodes(self, bring_back: Callable[[], None]) -> None:
        """Bring back failed envs, and open a chunk for each agent that has begun, also when bringing back raises."""
        refused = True
        while refused:
            try:
                bring_back()
            finally:
                # A lane may have begun twice, when it failed in between; what it sees is of its last beginning.
                started = [self.envs.lanes[index] for index in dict.fromkeys(self.envs.take_started())]
                refused = self._open_chunks([lane for lane in started if lane.episode is not None])
            bring_back = self.envs.try_restart

    def _open_chunks(self, started: Sequence[Lane]) -> bool:
        """Whether a callback's error has ended an episode at its start."""
        episodes = [cast(MultiAgentEpisode, lane.episode) for lane in started]
        self._begin_seats([seat for episode in episodes for seat in episode.acting])
        for episode in episodes:
            for seat in episode.acting:
                if seat.agent in episode.reset_info:
                    self._take_info(seat, episode.reset_info[seat.agent])
        return self._events.watches_starts and self._tell_starts(started)

    def _tell_starts(self, started: Sequence[Lane]) -> bool:
        refused = False
        for lane in started:
            error = self._events.started(lane, lane.episode) if lane.episode is not None else None
            if error is not None:
                self._abort(Failure(lane.index, error, stepped=True), recorded=True)
                refused = True
        return refused

    def _begin_seats(self, seats: Sequence[Seat]) -> None:
        """Agents have appeared, and their first observations arrived."""
        for part in parts_of(seats):
            part.module.start(part.rows)
        for seat in seats:
            seat.module.random.forget(seat.row)
            seat.fragment.begin(seat.row, seat.episode, self._state_in(seat))

    # -- the end of a fragment ----------------------------------------------------------------------------------------

    def cut(
        self, learner_epoch: int, weights_digest: str, slot: int, incarnation: int, *, keep_open: bool = False
    ) -> tuple[list[MultiAgentEpisode], ModuleBatches]:
        """The episodes that ended, and what is to be delivered by module; `keep_open`: whole episodes only."""
        stamp = Stamp(self._id_high, self.mode.flags, slot, incarnation, learner_epoch, weights_digest, self._horizon)
        over, self._over = self._over, []
        open_episodes = [] if keep_open else list(self._episodes())
        for episode in (*over, *open_episodes):
            self._totals.env_steps_delivered += episode.t - episode.t_cut
            episode.t_cut = episode.t
        batches = {}
        self.observed_more = {}
        for module in self.modules:
            if module.fragment is None and module.markers:
                module.fragment = SeatFragment(module.width, 1, module.connectors.columns)
            if module.fragment is not None:
                batches[module.module_id] = self._cut_module(module, module.fragment, stamp, keep_open)
        return over, ModuleBatches(batches)

    def _cut_module(self, module: ModuleSeats, fragment: SeatFragment, stamp: Stamp, keep_open: bool) -> ChunkBatch:
        seats = [seat for e in self._episodes() for seat in e.seats.values() if seat.module is module]
        hanging = [seat.row for seat in seats if seat.hangs]
        unfinished = [chunk for chunk in fragment.ended if self._goes_on(chunk)]
        chunks, module.fragment = fragment.take(hanging, unfinished, keep_open=keep_open)
        markers, module.markers = module.markers, []
        batch = cut_seats(fragment, chunks, markers, module.spaces, stamp, module.module_id)
        self._totals.open -= batch.steps
        self._totals.delivered += batch.steps
        self._totals.delivered_chunks += len(batch)
        for chunk in chunks:
            self.envs.lanes[chunk.episode.env_index].budget.delivered()
            chunk.episode.seam_info = chunk.infos.get(chunk.stop - chunk.start)
            self._count_observations(module, cast(AgentEpisode, chunk.episode))
        return batch

    def _count_observations(self, module: ModuleSeats, episode: AgentEpisode) -> None:
        if episode.observed_more:
            who = episode.agent, module.module_id
            self.observed_more[who] = self.observed_more.get(who, 0) + episode.observed_more
            episode.observed_more = 0

    def _goes_on(self, chunk: OpenChunk) -> bool:
        """Whether others still play in the episode."""
        episode = cast(AgentEpisode, chunk.episode)
        return self.envs.lanes[episode.env_index].episode is episode.whole

    def abandon(self, reason: Discard) -> None:
        """Every open episode is over: undelivered steps are lost by name, delivered parts get an end marker.

        That holds for agents that were done in an episode that was not, too.
        """
        lost = 0
        for episode in self._episodes():
            if self._events.watches_failures:
                self._events.aborted(self.look(self.envs.lanes[episode.env_index], episode), reason)
            lost += lose_episode(episode, reason)
        for module in self.modules:
            lost += lose_ended(module, self._goes_on, reason)
        self._totals.open -= lost
        self._totals.discard(reason, lost, sum(episode.t - episode.t_cut for episode in self._episodes()))
        self.envs.end_episodes(range(len(self.envs.lanes)))
        self.needs_reset = True

    def finish(self, reason: Discard) -> None:
        """`abandon`, with fragments for `cut` to deliver what had finished and to tell of the rest."""
        self.abandon(reason)
        for module in self.modules:
            module.open_fragment(1)

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
        for module in self.modules:
            ended = module.fragment.ended if module.fragment is not None else []
            module.markers += [Marker(chunk.episode, Discard.RESET) for chunk in ended if chunk.episode.chunks]
            module.fragment = None
        self._totals.discard(Discard.RESET, self._totals.open, sum(e.t - e.t_cut for e in self._over))
        self._totals.open = 0
        self._over = []
