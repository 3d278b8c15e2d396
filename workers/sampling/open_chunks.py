"""The open chunks of all seats, from the first observation in each until a cut delivers it or it is lost by name.

An agent step counts when the env has taken the action. It stands open, hanging or in a row, until then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

from numpy.typing import NDArray

from headrace.schemas.batch import ChunkBatch
from headrace.schemas.chunk import ChunkEnd
from headrace.schemas.ledger import Discard
from headrace.workers.agents.episodes import AgentEpisode, MultiAgentEpisode, Seat
from headrace.workers.agents.step_outcome import StepOutcome
from headrace.workers.agents.turn import Turn, parts_of
from headrace.workers.agents.vector import MultiAgentVector as AgentSeats
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.failures import Failure
from headrace.workers.metrics.totals import RunnerTotals
from headrace.workers.modules.action_masks import MASK
from headrace.workers.policy.module_seats import ModuleSeats
from headrace.workers.sampling.cutting import Marker, Stamp
from headrace.workers.sampling.fragment import OpenChunk
from headrace.workers.sampling.lost_steps import LossCounts, lose_ended, lose_episode
from headrace.workers.sampling.mode import Mode
from headrace.workers.sampling.module_batches import ModuleBatches
from headrace.workers.sampling.seat_cutting import cut_seats
from headrace.workers.sampling.seat_fragment import SeatFragment


class OpenChunks:
    """Those of the seats of `envs`, in one fragment for each module; `totals` are kept true.

    `observed_more`, of the last cut: (agent, module) -> how many more observations than actions it delivered.
    """

    def __init__(self, config: EnvRunnerConfig, envs: AgentSeats, totals: RunnerTotals, id_high: int) -> None:
        self.mode = Mode(config.explore, random_actions=False)
        self.losses = LossCounts()
        self.observed_more: dict[tuple[str, str], int] = {}
        self.over: list[MultiAgentEpisode] = []
        """Episodes that ended since the last cut."""
        self._envs = envs
        self._totals = totals
        self._id_high = id_high
        self._keeps_infos = config.infos == "all"
        self._horizon = config.episode_lookback_horizon

    @property
    def _modules(self) -> Iterable[ModuleSeats]:
        return self._envs.modules.values()

    @property
    def episodes(self) -> Iterator[MultiAgentEpisode]:
        """Those that go on, by env."""
        return (lane.episode for lane in self._envs.lanes if isinstance(lane.episode, MultiAgentEpisode))

    @property
    def has_fragments(self) -> bool:
        """Whether there may be steps that were not cut yet."""
        return any(module.fragment is not None for module in self._modules)

    def count(self, turn: Turn, outcome: StepOutcome) -> None:
        """The seats of `turn` acted; where an env raised, its agents' actions were not taken."""
        raised = [failure.lane for failure in outcome.failures if not failure.stepped]
        untaken = sum(len(episode.acting) for lane, episode in turn.lanes if lane.index in raised) if raised else 0
        self._totals.stepped += len(turn.seats) - untaken
        self._totals.open += len(turn.seats) - untaken
        self._totals.env_steps += len(turn.lanes) - len(raised)

    # -- chunks that begin, go on and end -----------------------------------------------------------------------------

    def resume(self, mode: Mode, capacity: int) -> None:
        """Agents go on in new fragments; the info of the observation at the seam belongs to both chunks."""
        self.mode = mode
        self.open_fragments(capacity)
        for episode in self.episodes:
            for seat in episode.seats.values():
                fragment = seat.fragment
                if not seat.done and fragment.open[seat.row] is None:
                    fragment.begin(seat.row, seat.episode, self._state_in(seat))
                    if seat.episode.seam_info:
                        fragment.add_info(seat.row, seat.episode.seam_info)

    def open_fragments(self, capacity: int) -> None:
        """Have a fragment for each module that has seats."""
        for module in self._modules:
            module.open_fragment(capacity)

    def begin(self, seats: Sequence[Seat]) -> None:
        """Agents have appeared, and their first observations arrived."""
        for part in parts_of(seats):
            part.module.start(part.rows)
        for seat in seats:
            seat.module.random.forget(seat.row)
            seat.fragment.begin(seat.row, seat.episode, self._state_in(seat))

    def _state_in(self, seat: Seat) -> dict[str, NDArray[Any]]:
        return {} if self.mode.random_actions else seat.module.state_in(seat.row, hangs=seat.is_awaited)

    def record(self, outcome: StepOutcome) -> None:
        """Write what the last step brought for the seats, as far as they go on or have just begun."""
        for part in parts_of(outcome.answered):
            unseen = [seat.row for seat in outcome.unseen if seat.module is part.module] if outcome.unseen else ()
            part.module.answer(part.rows, part.of_array(outcome.rewards), unseen)
        if outcome.newcomers:
            self.begin(outcome.newcomers)
        for seat, info in outcome.infos:
            self.take_info(seat, info)
        for seat in outcome.dropped:
            self._totals.open -= 1
            self._totals.discard(Discard.ENV_BAD_DATA, 1, env_steps=0)
            self.losses.final_steps_dropped += 1
            self.losses.lose(seat.reward)
            seat.hangs, seat.reward = False, 0.0
        self.losses.final_observations_repeated += outcome.repeated

    def take_info(self, seat: Seat, info: dict[str, Any]) -> None:
        """The info that came with what the seat sees now; one that came without an observation is nobody's."""
        if seat.hangs:
            return
        if MASK in info and not seat.done:
            seat.module.random.tell(seat.row, info[MASK])
        if self._keeps_infos:
            seat.fragment.add_info(seat.row, info)

    def end(self, ended: Sequence[tuple[Seat, ChunkEnd]]) -> None:
        """These seats will not be seen in their episodes again."""
        for part in parts_of([seat for seat, _ in ended]):
            self._end_seats(part.module, part.of(ended))

    def _end_seats(self, module: ModuleSeats, ended: Sequence[tuple[Seat, ChunkEnd]]) -> None:
        assert module.fragment is not None
        for seat, _ in ended:
            chunk = module.fragment.open[seat.row]
            is_empty = chunk is not None and module.fragment.cursor(seat.row) == chunk.start
            if is_empty and seat.episode.chunks:  # its last step was dropped, and it was the only one
                module.markers.append(Marker(seat.episode, Discard.ENV_BAD_DATA))
        module.fragment.end([(seat.row, end) for seat, end in ended])

    def end_episode(self, episode: MultiAgentEpisode) -> None:
        """It is over, and all its seats are done; what agents got that never appeared has no step to belong to."""
        for reward in episode.early_rewards.values():
            self.losses.lose(reward)
        self.over.append(episode)

    # -- chunks that are lost -----------------------------------------------------------------------------------------

    def lose(self, failure: Failure, episode: MultiAgentEpisode, *, recorded: bool) -> None:
        """The open chunks of all agents of a failed episode are lost by name.

        `recorded` says that the last step stands in the chunks already.
        """
        unrecorded = [] if recorded else episode.acting
        lost = lose_episode(episode, failure.reason, unrecorded) + len(unrecorded) * failure.stepped
        failure.discarded = lost
        failure.at = f"step {episode.t + (not failure.stepped)} of episode {self._id_high:016x}{episode.id_low:016x}"
        self._totals.open -= lost
        self._totals.discard(failure.reason, lost, episode.t - episode.t_cut)

    def lose_all(self, reason: Discard) -> None:
        """Those of all episodes that go on: undelivered steps are lost by name, delivered parts get an end marker.

        That holds for agents that were done in an episode that was not, too.
        """
        lost = sum(lose_episode(episode, reason) for episode in self.episodes)
        for module in self._modules:
            lost += lose_ended(module, self._goes_on, reason)
        self._totals.open -= lost
        self._totals.discard(reason, lost, sum(episode.t - episode.t_cut for episode in self.episodes))

    def lose_over(self, reason: Discard) -> None:
        """When no episode goes on any more: what ended since the last cut is lost too, and the fragments with it."""
        for module in self._modules:
            ended = module.fragment.ended if module.fragment is not None else []
            module.markers += [Marker(chunk.episode, reason) for chunk in ended if chunk.episode.chunks]
            module.fragment = None
        self._totals.discard(reason, self._totals.open, sum(e.t - e.t_cut for e in self.over))
        self._totals.open = 0
        self.over = []

    # -- the end of a fragment ----------------------------------------------------------------------------------------

    def cut(
        self, learner_epoch: int, weights_digest: str, slot: int, incarnation: int, *, keep_open: bool
    ) -> tuple[list[MultiAgentEpisode], ModuleBatches]:
        """The episodes that ended, and what is to be delivered by module; `keep_open`: whole episodes only."""
        stamp = Stamp(self._id_high, self.mode.flags, slot, incarnation, learner_epoch, weights_digest, self._horizon)
        over, self.over = self.over, []
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
            if module.fragment is None and module.markers:
                module.fragment = SeatFragment(module.width, 1, module.connectors.columns)
            if module.fragment is not None:
                batches[module.module_id] = self._cut_module(module, module.fragment, stamp, keep_open)
        return over, ModuleBatches(batches)

    def _cut_module(self, module: ModuleSeats, fragment: SeatFragment, stamp: Stamp, keep_open: bool) -> ChunkBatch:
        seats = [seat for e in self.episodes for seat in e.seats.values() if seat.module is module]
        hanging = [seat.row for seat in seats if seat.is_awaited]
        unfinished = [chunk for chunk in fragment.ended if self._goes_on(chunk)]
        for seat in seats:
            chunk = fragment.open[seat.row]
            if chunk is not None and fragment.cursor(seat.row) == chunk.start:
                seat.episode.seam_info = chunk.infos.get(0)  # of a chunk without a step yet, which is not cut
        taken, module.fragment = fragment.take(hanging, unfinished, keep_open=keep_open)
        chunks = self._to_deliver(fragment, taken)
        markers, module.markers = module.markers, []
        batch = cut_seats(fragment, chunks, markers, module.spaces, stamp, module.module_id)
        self._totals.open -= batch.steps
        self._totals.delivered += batch.steps
        self._totals.delivered_chunks += len(batch)
        for chunk in chunks:
            self._envs.lanes[chunk.episode.env_index].budget.delivered()
            chunk.episode.seam_info = chunk.infos.get(chunk.stop - chunk.start)
            self._count_observations(module, cast(AgentEpisode, chunk.episode))
        return batch

    def _to_deliver(self, fragment: SeatFragment, chunks: Sequence[OpenChunk]) -> list[OpenChunk]:
        """Those of `chunks` that a learner is to have; what is in the others is counted."""
        delivered = []
        for chunk in chunks:
            episode = cast(AgentEpisode, chunk.episode)
            if episode.whole is None or episode.whole.trains:
                delivered.append(chunk)
                continue
            steps = chunk.stop - chunk.start
            episode.steps += steps
            episode.episode_return += float(fragment.columns["rewards"][chunk.lane, chunk.start : chunk.stop].sum())
            self._totals.open -= steps
            self._totals.discard(Discard.TRAINING_DISABLED, steps, env_steps=0)
            self._envs.lanes[episode.env_index].budget.delivered()
        return delivered

    def _count_observations(self, module: ModuleSeats, episode: AgentEpisode) -> None:
        if episode.observed_more:
            who = episode.agent, module.module_id
            self.observed_more[who] = self.observed_more.get(who, 0) + episode.observed_more
            episode.observed_more = 0

    def _goes_on(self, chunk: OpenChunk) -> bool:
        """Whether others still play in the episode."""
        episode = cast(AgentEpisode, chunk.episode)
        return self._envs.lanes[episode.env_index].episode is episode.whole
