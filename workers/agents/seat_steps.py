"""The steps of several agents in each env. Each module acts for its seats and has its own fragment for their rows.

An agent step counts when the env has taken the action. It stands open, pending or in a row, until it is cut or lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.accounts.ledger import Discard
from headrace.schemas.chunks.batch import OFF_POLICY, ChunkBatch
from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.errors import ConnectorError, EnvContractError, ModuleError
from headrace.workers.agents.acting_seats import ActingSeats, SeatGroup, acting_seats, seat_groups
from headrace.workers.agents.agent_views import MultiAgentEpisodeView
from headrace.workers.agents.episodes import AgentEpisode, MultiAgentEpisode, Seat
from headrace.workers.agents.module_seats import ModuleSeats, check_seats, read_seats, write_seats
from headrace.workers.agents.seat_fragment import LostRewards, SeatFragment, cut_seats, lose_ended, lose_episode
from headrace.workers.agents.vector import MultiAgentVector, StepOutcome
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.action_masks import MASK
from headrace.workers.envs.actions import to_env_form
from headrace.workers.envs.driver import idle_lanes, next_to_act
from headrace.workers.envs.failures import Failure
from headrace.workers.envs.lane import Lane, check_lanes, read_lanes, write_lanes
from headrace.workers.metrics.totals import RunnerTotals
from headrace.workers.policy.acting import Columns
from headrace.workers.policy.acting_module import ActingModule
from headrace.workers.randomness.seeds import SeedTree
from headrace.workers.sampling.cutting import Marker, Stamp, count_cut, keep_back
from headrace.workers.sampling.fragment import OpenChunk
from headrace.workers.sampling.logged_actions import put_logged
from headrace.workers.sampling.module_batches import ModuleBatches
from headrace.workers.sampling.sampled_steps import ActionMode, KeptSteps

Taken = tuple[list[MultiAgentEpisode], ModuleBatches]
"""The contents of a cut: the episodes that have ended, and the parts to deliver, by module."""


class SeatSteps(KeptSteps):
    """`SampledSteps` of the agents of `vector`, in lock-step or with each env at its own pace.

    The seats of a module share one fragment. `observed_more` is for the last cut: (agent, module) -> number of
    observations delivered minus number of actions. Chunks of external episodes have the column "off_policy": see
    `LaneSteps`.
    """

    def __init__(
        self, config: EnvRunnerConfig, vector: MultiAgentVector, seeds: SeedTree, totals: RunnerTotals, id_high: int
    ) -> None:
        super().__init__(config, vector.envs, seeds, totals, id_high)
        self.seating = vector.seating
        self._vector = vector
        self.lost_rewards = LostRewards()
        self.observed_more: dict[tuple[str, str], int] = {}
        self._fragments: dict[str, SeatFragment] = {}
        self._capacity: int | None = None
        """Room in new fragments; None before sampling, and when all steps were given up."""
        self._markers: dict[str, list[Marker]] = {}
        self._over: list[MultiAgentEpisode] = []
        """Episodes that ended since the last cut."""
        self._acting: ActingSeats | None = None
        """The seats that acted in the newest poll, and the actions they chose."""
        self._actions: list[Any] = []
        self._follow_modules()

    def _follow_modules(self) -> None:
        for module in self._modules:
            module.on_widen = partial(self._follow, module)
            self._markers.setdefault(module.module_id, [])

    def _follow(self, module: ModuleSeats) -> None:
        """Make room for the steps of a module that has more seats now."""
        fragment = self._fragments.get(module.module_id)
        if fragment is not None:
            fragment.widen(module.policy.connectors.columns)
        elif self._capacity is not None:
            self.open_fragments(self._capacity)

    @property
    def _modules(self) -> Iterable[ModuleSeats]:
        return self.seating.modules.values()

    @property
    def policies(self) -> dict[str, ActingModule]:
        return {module.module_id: module.policy for module in self._modules}

    @property
    def episodes(self) -> Iterator[MultiAgentEpisode]:
        """The open episodes, by env."""
        return (lane.episode for lane in self.envs.lanes if isinstance(lane.episode, MultiAgentEpisode))

    @property
    def is_open(self) -> bool:
        return bool(self._fragments)

    @property
    def episodes_ended(self) -> int:
        return sum(episode.trains for episode in self._over)

    @property
    def has_pending(self) -> bool:
        return bool(self.envs.under_way) or any(
            seat.pending for episode in self.episodes for seat in episode.seats.values()
        )

    def _fragment(self, seat: Seat) -> SeatFragment:
        return self._fragments[seat.module.module_id]

    def look(self, lane: Lane, episode: MultiAgentEpisode) -> MultiAgentEpisodeView:
        return MultiAgentEpisodeView(episode, self._id_high, self._fragments)

    def look_back(self, lane: Lane, episode: MultiAgentEpisode, failure: Failure) -> MultiAgentEpisodeView:
        return self.look(lane, episode).lasting()

    # -- fragments and chunks that begin ------------------------------------------------------------------------------

    def resume(self, mode: ActionMode, capacity: int) -> None:
        """Continue agents in new fragments. Both chunks get the info of the observation between them."""
        self.mode = mode
        self.open_fragments(capacity)
        for episode in self.episodes:
            for seat in episode.seats.values():
                if not seat.done and self._fragment(seat).open[seat.row] is None:
                    self._fragment(seat).begin(seat.row, seat.episode, self._state_in(seat))
                    if seat.episode.seam_info:
                        self._fragment(seat).add_info(seat.row, seat.episode.seam_info)

    def open_fragments(self, capacity: int) -> None:
        self._capacity = capacity
        for module in self._modules:
            if module.width and module.module_id not in self._fragments:
                columns = module.policy.connectors.columns
                self._fragments[module.module_id] = SeatFragment(module.width, capacity, columns)

    def begin(self, started: Sequence[Lane]) -> None:
        episodes = [cast(MultiAgentEpisode, lane.episode) for lane in started]
        self._begin_seats([seat for episode in episodes for seat in episode.acting])
        for episode in episodes:
            for seat in episode.acting:
                if seat.agent in episode.reset_info:
                    self._take_info(seat, episode.reset_info[seat.agent])

    def _begin_seats(self, seats: Sequence[Seat]) -> None:
        """Begin the chunks of new agents, whose first observations have arrived."""
        for group in seat_groups(seats):
            group.module.policy.start(group.rows)
        for seat in seats:
            self._fragment(seat).begin(seat.row, seat.episode, self._state_in(seat))

    def _state_in(self, seat: Seat) -> dict[str, NDArray[Any]]:
        return {} if self.mode.random_actions else seat.module.policy.state_in(seat.row, pending=seat.is_awaited)

    # -- one poll -----------------------------------------------------------------------------------------------------

    @property
    def is_masked(self) -> bool:
        policies = [module.policy for module in self._modules]
        if self.mode.random_actions:
            return any(policy.random.is_masked for policy in policies)
        return any(policy.mask is not None for policy in policies)

    def unable(self) -> list[Failure]:
        if not self.is_masked:
            return []
        random_actions = self.mode.random_actions
        failures: dict[int, Failure] = {}
        acting = acting_seats([self.envs.lanes[index] for index in idle_lanes(self.envs, self._width).tolist()])
        for group in acting.groups:
            seats = group.of(acting.seats)
            for position, error in group.module.policy.faults(group.rows, random_actions=random_actions):
                seat = seats[position]
                named = EnvContractError(f"{error.what} of agent {seat.agent!r}", error.seen, error.expected)
                failures.setdefault(seat.episode.env_index, Failure(seat.episode.env_index, named, stepped=True))
        return list(failures.values())

    def act(self, weights_seq: int) -> None:
        choose: Callable[[ActingSeats, int], list[Any]] = self._choose
        if self.timers is not None and not self.mode.random_actions:
            choose = self.timers.timed("rlmodule_inference_timer", choose)
        if self._in_step:
            self._acting = acting = self._vector.acting()
            self._actions = choose(acting, weights_seq)
            return
        lanes = next_to_act(self.envs, self._width)
        if len(lanes):
            acting = acting_seats([self.envs.lanes[index] for index in lanes.tolist()])
            self._vector.send(acting, choose(acting, weights_seq))

    def _choose(self, acting: ActingSeats, weights_seq: int) -> list[Any]:
        """Let each module act once for all its seats; returns actions in the order of the seats of `acting`."""
        actions: list[Any] = [None] * len(acting.seats)
        env_t = acting.env_t()
        for group in acting.groups:
            module, rows = group.module, group.rows
            columns = self._columns_of(acting, group, weights_seq)
            fragment = self._fragments[module.module_id]
            fragment.act_at(rows, columns, weights_seq, group.of_array(env_t))
            root = "actions_for_env" if any(name.startswith("actions_for_env") for name in columns) else "actions"
            sent = {name: column[rows] for name, column in columns.items() if name.startswith(root)}
            formed = to_env_form(module.env_spaces.action, sent, root)
            if group.places is None:
                return formed
            for place, action in zip(group.places.tolist(), formed, strict=True):
                actions[place] = action
        return actions

    def _columns_of(self, acting: ActingSeats, group: SeatGroup, weights_seq: int) -> Columns:
        """Return the actions of a group's module, in columns with a row for each seat of the module."""
        policy, mode = group.module.policy, self.mode
        columns = policy.act(
            group.rows, explore=mode.explore, random_actions=mode.random_actions, weights_seq=weights_seq
        )
        if self._external is None:
            return columns
        columns = {**columns, OFF_POLICY: np.zeros(group.module.width, np.bool_)}
        logged = self._external.logged(group.of(acting.seats))
        if logged:
            columns = put_logged(columns, logged, policy.module, group.module.env_spaces.action)
        return columns

    def take(self) -> StepOutcome | None:
        if self._in_step:
            step = self._vector.step if self.timers is None else self.timers.timed("env_step_timer", self._vector.step)
            if self._steps_inline:
                return step(self._newest_acting, self._actions)
            return self._totals.timers.budget.of_envs(lambda: step(self._newest_acting, self._actions))
        take = self._vector.take if self.timers is None else self.timers.timed("env_step_timer", self._vector.take)
        acting, outcome = self._totals.timers.budget.of_envs(take)
        self._acting = acting
        if not acting.lanes:
            return None
        assert self.answered is not None
        self.answered += len(acting.lanes)
        return outcome

    def is_spoilt_by(self, error: BaseException) -> bool:
        """See `SampledSteps`. A module's error spoils steps only if a recurrent memory may hold a step not taken."""
        remembers = any(policy.remembers for policy in self.policies.values())
        return isinstance(error, ConnectorError) or (isinstance(error, ModuleError) and remembers)

    def count(self, outcome: StepOutcome) -> None:
        """Count the steps of the seats that acted. Where an env raised, its agents' actions were not taken."""
        acting = self._newest_acting
        raised = [failure.lane for failure in outcome.failures if not failure.stepped]
        untaken = sum(len(episode.acting) for lane, episode in acting.lanes if lane.index in raised) if raised else 0
        self._totals.stepped += len(acting.seats) - untaken
        self._totals.open += len(acting.seats) - untaken
        self._totals.env_steps += len(acting.lanes) - len(raised)

    @property
    def _newest_acting(self) -> ActingSeats:
        assert self._acting is not None, "a poll has acting seats"
        return self._acting

    def record(self, outcome: StepOutcome) -> None:
        """Write the results of the last step for all seats that continue or have just begun."""
        for group in seat_groups(outcome.answered):
            unseen = [seat.row for seat in outcome.unseen if seat.module is group.module] if outcome.unseen else ()
            self._answer(group, group.of_array(outcome.rewards), unseen)
        if outcome.newcomers:
            self._begin_seats(outcome.newcomers)
        for seat, info in outcome.infos:
            self._take_info(seat, info)
        for seat in outcome.dropped:
            self._totals.open -= 1
            self._totals.discard(Discard.ENV_BAD_DATA, 1, env_steps=0)
            self.lost_rewards.final_steps_dropped += 1
            self.lost_rewards.add(seat.reward)
            seat.pending, seat.reward = False, 0.0
        self.lost_rewards.final_observations_repeated += outcome.repeated

    def _answer(self, group: SeatGroup, rewards: NDArray[np.float64], unseen: Sequence[int]) -> None:
        """Complete the last steps of a module's seats with their new observations. `unseen` rows have no new one."""
        fragment, connectors, rows = self._fragments[group.module.module_id], group.module.policy.connectors, group.rows
        if connectors.sees:
            new = ~np.isin(rows, unseen) if unseen else slice(None)
            seen = rows[new]
            chosen = fragment.chosen(seen, connectors.actions)
            if len(seen):
                connectors.stepped(seen, chosen, rewards[new])
        fragment.answer(rows, rewards)

    def _take_info(self, seat: Seat, info: dict[str, Any]) -> None:
        """Keep the info of the seat's current observation. An info without an observation belongs to no step."""
        if seat.pending:
            return
        if MASK in info and not seat.done:
            seat.module.policy.random.tell(seat.row, info[MASK])
        if self._keeps_infos:
            self._fragment(seat).add_info(seat.row, info)

    def stepped(self, outcome: StepOutcome) -> Iterable[tuple[Lane, MultiAgentEpisode]]:
        return self._newest_acting.lanes

    def over(self, outcome: StepOutcome) -> Mapping[int, ChunkEnd]:
        return outcome.over

    def withdraw(self, outcome: StepOutcome, lane: Lane) -> None:
        outcome.over.pop(lane.index, None)
        outcome.ended = [(seat, end) for seat, end in outcome.ended if seat.episode.whole is not lane.episode]

    def end(self, outcome: StepOutcome) -> None:
        for group in seat_groups([seat for seat, _ in outcome.ended]):
            self._end_seats(group.module.module_id, group.of(outcome.ended))
        for index in outcome.over:
            episode = self.envs.lanes[index].episode
            assert isinstance(episode, MultiAgentEpisode)
            for reward in episode.early_rewards.values():
                self.lost_rewards.add(reward)
            self._over.append(episode)

    def _end_seats(self, module_id: str, ended: Sequence[tuple[Seat, ChunkEnd]]) -> None:
        fragment = self._fragments[module_id]
        for seat, _ in ended:
            chunk = fragment.open[seat.row]
            is_empty = chunk is not None and fragment.cursor(seat.row) == chunk.start
            if is_empty and seat.episode.chunks:  # its only step was dropped
                self._markers[module_id].append(Marker(seat.episode, Discard.ENV_BAD_DATA))
        fragment.end([(seat.row, end) for seat, end in ended])

    # -- steps that are lost ------------------------------------------------------------------------------------------

    def lose(self, failure: Failure, *, recorded: bool) -> None:
        episode = self.envs.lanes[failure.lane].episode
        assert isinstance(episode, MultiAgentEpisode), "only an env with an episode is stepped"
        unrecorded = [] if recorded else episode.acting
        if self._totals.kept is not None and not recorded and self._external is None:
            steps = episode.t + (not failure.stepped)
            failure.episode = self._totals.kept.trail.of_agents(episode, steps, self._rows_of(episode))
        lost = lose_episode(episode, failure.reason, self._fragments, self._markers, unrecorded)
        lost += len(unrecorded) * failure.stepped
        failure.discarded = lost
        failure.at = f"step {episode.t + (not failure.stepped)} of episode {self._id_high:016x}{episode.id_low:016x}"
        self._totals.open -= lost
        self._totals.discard(failure.reason, lost, episode.t - episode.t_cut)

    def _rows_of(self, episode: MultiAgentEpisode) -> Iterator[tuple[int, AgentEpisode, Any, tuple[int, slice], bool]]:
        """Yield what repeats each agent's steps: see `AgentRows`."""
        for seat in episode.seats.values():
            agent, shows_all = self.seating.agents[seat.agent], not seat.module.policy.connectors.sees
            fragment = self._fragments.get(seat.module.module_id)
            if fragment is None:  # the agent was done, and cut, before
                yield agent, seat.episode, {}, (seat.row, slice(0, 0)), shows_all
                continue
            awaited = seat.pending or (not seat.done and seat in episode.acting)
            rows = fragment.rows_of(seat.row, seat.episode, pending=awaited)
            where = slice(rows.start, rows.stop + awaited) if rows is not None else slice(0, 0)
            yield agent, seat.episode, fragment.columns, (seat.row, where), shows_all

    def lose_open(self, reason: Discard) -> None:
        """See `SampledSteps`. In episodes that continue, agents that are done lose their steps too."""
        for policy in self.policies.values():
            policy.drop_chosen(None)
        lost = sum(lose_episode(episode, reason, self._fragments, self._markers) for episode in self.episodes)
        for module_id, fragment in self._fragments.items():
            lost += lose_ended(fragment, self._goes_on, reason, self._markers[module_id])
        self._totals.open -= lost
        self._totals.discard(reason, lost, sum(episode.t - episode.t_cut for episode in self.episodes))

    def lose_ended(self, reason: Discard) -> None:
        for module_id, fragment in self._fragments.items():
            self._markers[module_id] += [
                Marker(chunk.episode, reason) for chunk in fragment.ended if chunk.episode.chunks
            ]
        self._fragments.clear()
        self._capacity = None
        self._totals.discard(reason, self._totals.open, sum(e.t - e.t_cut for e in self._over))
        self._totals.open = 0
        self._over = []

    def drop_markers(self) -> None:
        for markers in self._markers.values():
            markers.clear()

    def rebuild(self, config: EnvRunnerConfig) -> None:
        earlier = self.policies
        self.envs.build(config)
        self._follow_modules()
        for module_id, policy in self.policies.items():
            if module_id in earlier:
                policy.take_connectors_of(earlier[module_id])

    # -- the end of a fragment ----------------------------------------------------------------------------------------

    def cut(self, stamp: Stamp, *, keep_open: bool) -> Taken:
        over, self._over = self._over, []
        open_episodes = [] if keep_open else list(self.episodes)
        for episode in (*over, *open_episodes):
            if episode.trains:
                self._totals.env_steps_delivered += episode.t - episode.t_cut
            else:
                self._totals.discard(Discard.TRAINING_DISABLED, 0, episode.t - episode.t_cut)
            episode.t_cut = episode.t
        batches = {}
        self.observed_more = {}
        for module in self._modules:
            fragment = self._fragments.pop(module.module_id, None)
            if fragment is None and self._markers[module.module_id]:
                fragment = SeatFragment(module.width, 1, module.policy.connectors.columns)
            if fragment is not None:
                batches[module.module_id] = self._cut_module(module, fragment, stamp, keep_open)
        return over, ModuleBatches(batches)

    def _cut_module(self, module: ModuleSeats, fragment: SeatFragment, stamp: Stamp, keep_open: bool) -> ChunkBatch:
        module_id = module.module_id
        seats = [seat for e in self.episodes for seat in e.seats.values() if seat.module is module]
        pending = [seat.row for seat in seats if seat.is_awaited]
        unfinished = [chunk for chunk in fragment.ended if self._goes_on(chunk)]
        for seat in seats:
            chunk = fragment.open[seat.row]
            if chunk is not None and fragment.cursor(seat.row) == chunk.start:
                seat.episode.seam_info = chunk.infos.get(0)  # of a chunk without a step yet, which is not cut
        taken, moved = fragment.take_chunks(pending, unfinished, keep_open=keep_open)
        if moved is not None:
            self._fragments[module_id] = moved
        chunks = keep_back(fragment, taken, self._totals, self.envs.lanes, env_steps=0)
        markers, self._markers[module_id] = self._markers[module_id], []
        batch = cut_seats(fragment, chunks, markers, module.policy.spaces, stamp, module_id)
        if self._totals.kept is not None:
            shows_all = not module.policy.connectors.sees
            self._totals.kept.trail.add(batch.arrays, chunks, shows_all, self._goes_on)
        count_cut(batch, chunks, self._totals, self.envs.lanes)
        for episode in (cast(AgentEpisode, chunk.episode) for chunk in chunks):
            if episode.observed_more:
                key = episode.agent, module_id
                self.observed_more[key] = self.observed_more.get(key, 0) + episode.observed_more
                episode.observed_more = 0
        return batch

    def _goes_on(self, chunk: OpenChunk) -> bool:
        """Return whether other agents still play in the chunk's episode."""
        episode = cast(AgentEpisode, chunk.episode)
        return self.envs.lanes[episode.env_index].episode is episode.whole

    # -- random streams -----------------------------------------------------------------------------------------------

    def read_streams(self) -> dict[str, Any]:
        lanes = self.envs.lanes
        unstepped = [isinstance(lane.episode, MultiAgentEpisode) and not lane.episode.t for lane in lanes]
        return {"lanes": read_lanes(lanes, unstepped), "seats": read_seats(self._seeds.seats, self.seating.modules)}

    def accept_streams(self, state: Mapping[str, Any]) -> Callable[[], None]:
        lanes, seating = self.envs.lanes, self.seating
        check_lanes(lanes, state.get("lanes"))
        check_seats(seating.modules, len(lanes), len(seating.agents), state.get("seats"))

        def write() -> None:
            write_lanes(lanes, state["lanes"])
            write_seats(self._seeds.seats, seating.modules, state["seats"])

        return write
