"""The steps of envs of one agent: one policy acts for all lanes, and one fragment keeps their rows until a cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.accounts.ledger import Discard
from headrace.schemas.chunks.batch import OFF_POLICY, ChunkBatch
from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.chunks.module_spaces import DEFAULT_MODULE_ID
from headrace.schemas.chunks.spaces import leaves
from headrace.schemas.errors import ConnectorError
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.connectors.vector_connectors import VectorConnectors
from headrace.workers.envs.action_masks import MASK
from headrace.workers.envs.actions import action_root
from headrace.workers.envs.bounds import ActionLimits
from headrace.workers.envs.driver import EnvDriver, ExternalDriver, Rows, idle_lanes, next_to_act
from headrace.workers.envs.failures import Failure
from headrace.workers.envs.lane import Episode, Lane, check_lanes, read_lanes, write_lanes
from headrace.workers.envs.sequential_step import Outcome
from headrace.workers.metrics.totals import RunnerTotals
from headrace.workers.policy.acting import Columns
from headrace.workers.policy.acting_module import ActingModule
from headrace.workers.policy.noise import ActionNoise
from headrace.workers.randomness.seeds import NoiseUse, SeedTree
from headrace.workers.sampling.cutting import Marker, Stamp, count_cut, cut, keep_back
from headrace.workers.sampling.episode_view import EpisodeView, OpenRows
from headrace.workers.sampling.fragment import Fragment, OpenChunk
from headrace.workers.sampling.logged_actions import put_logged
from headrace.workers.sampling.sampled_steps import ActionMode, KeptSteps

_NO_STATE: dict[str, NDArray[Any]] = {}
"""Shared by all chunks: one dict for each would cost garbage collection."""


class LaneSteps(KeptSteps):
    """`SampledSteps` of one agent in each env of `envs`, in lock-step or with each lane at its own pace.

    In lock-step all live lanes act in each poll, and their rows are written without index arrays while all lanes stand
    at the same row. At other paces, an action without a reply at a cut is the first step of the lane's next chunk.
    If its episode is abandoned, it is not counted.

    Chunks of external episodes have the column "off_policy", bool (T,): True where the client logged the action. For
    those steps `actions` has the logged action. `logp` is its log-probability under the policy, or NaN if the module
    cannot compute it.
    """

    envs: EnvDriver

    def __init__(
        self, config: EnvRunnerConfig, envs: EnvDriver, seeds: SeedTree, totals: RunnerTotals, id_high: int
    ) -> None:
        super().__init__(config, envs, seeds, totals, id_high)
        self._fragment: Fragment | None = None
        self._markers: list[Marker] = []
        self._untrained: list[tuple[float, int]] = []
        self._on_policy = np.zeros(self._width, np.bool_)
        """The column "off_policy" while every action is the policy's."""
        self._is_spoilt = False
        self._live: Rows | None = None
        """The lanes that act in the poll under way, in lock-step; None are all."""
        self._chosen: Columns = {}
        """The actions that the newest outcome answers, a row for each lane that has stepped, if a connector looks."""
        self._policy = self._new_policy(config)

    def _new_policy(self, config: EnvRunnerConfig) -> ActingModule:
        envs = self.envs
        connectors = VectorConnectors(
            config.env_to_module, config.module_to_env, envs.spaces, envs.observations.columns
        )
        streams: dict[NoiseUse, list[np.random.Generator]] = {
            "policy": self._seeds.policy,
            "random_actions": self._seeds.random_actions,
        }
        noise = ActionNoise(streams.__getitem__, in_step=self._in_step)
        return ActingModule(DEFAULT_MODULE_ID, envs.spaces, connectors, noise, list(envs.halves))

    @property
    def policies(self) -> dict[str, ActingModule]:
        return {DEFAULT_MODULE_ID: self._policy}

    @property
    def is_open(self) -> bool:
        return self._fragment is not None

    @property
    def fragment(self) -> Fragment:
        """The fragment that is being filled."""
        assert self._fragment is not None, "resume() opens a fragment"
        return self._fragment

    @property
    def episodes_ended(self) -> int:
        """Episodes that finished in the fragment and will be delivered."""
        ended = self.fragment.ended
        return len(ended) if self._external is None else sum(chunk.episode.trains for chunk in ended)

    @property
    def has_pending(self) -> bool:
        """Return whether an action is not answered yet. In lock-step each is answered by the step it is sent in."""
        return bool(self.envs.under_way)

    def look(self, lane: Lane, episode: Episode, *, undone: bool = False) -> EpisodeView:
        """Return how `episode` of the lane stands now, without its last row if that was `undone`."""
        spaces = self._policy.spaces
        chunk = self._fragment.open[lane.index] if self._fragment is not None else None
        if chunk is None or chunk.episode is not episode:
            return EpisodeView(episode, self._id_high, spaces)
        stop = self.fragment.cursor(lane.index) - undone
        columns = self.fragment.columns
        rows = OpenRows(columns, self._policy.connectors.columns, chunk.infos, lane.index, chunk.start, stop)
        return EpisodeView(episode, self._id_high, spaces, rows)

    def look_back(self, lane: Lane, episode: Episode, failure: Failure) -> EpisodeView:
        return self.look(lane, episode, undone=not failure.stepped)

    # -- fragments and chunks that begin ------------------------------------------------------------------------------

    def resume(self, mode: ActionMode, capacity: int) -> None:
        """Let episodes go on in a new fragment; the info of the observation at the seam belongs to both chunks."""
        self.mode = mode
        self.open_fragments(capacity + capacity // 4 if self.envs.steps_to_reset else capacity)
        for lane in self.envs.lanes:
            episode = lane.episode
            if episode is not None and self.fragment.open[lane.index] is None:
                self.fragment.begin(lane.index, episode, self._state_in(lane.index))
                info = episode.seam_info if episode.chunks else episode.reset_info
                if info and self._keeps_infos:
                    self.fragment.add_info(lane.index, info)

    def open_fragments(self, capacity: int) -> None:
        if self._fragment is None:
            split = self._policy.split if self._in_step else None
            self._fragment = Fragment(self._width, capacity, self._policy.connectors.columns, split)

    def begin(self, started: Sequence[Lane]) -> None:
        self._is_spoilt = True  # reset below: a connector that raises has already seen some of the lanes
        self._policy.start([lane.index for lane in started])
        for lane in started:
            assert lane.episode is not None, "only lanes with an episode have started"
            self.fragment.begin(lane.index, lane.episode, self._state_in(lane.index))
            if lane.episode.reset_info:
                self._take_info(lane.index, lane.episode.reset_info)
        self._is_spoilt = False

    def _take_info(self, lane: int, info: dict[str, Any]) -> None:
        if MASK in info:
            self._policy.random.tell(lane, info[MASK])
        if self._keeps_infos:
            self.fragment.add_info(lane, info)

    def _state_in(self, lane: int) -> Mapping[str, NDArray[Any]]:
        """Return a recurrent module's state for the lane; empty without one, or for random actions."""
        if self._policy.memory is None or self.mode.random_actions:
            return _NO_STATE
        return self._policy.state_in(lane, pending=lane in self.envs.under_way)

    # -- one poll -----------------------------------------------------------------------------------------------------

    @property
    def is_masked(self) -> bool:
        policy = self._policy
        return policy.random.is_masked if self.mode.random_actions else policy.mask is not None

    def unable(self) -> list[Failure]:
        policy, random_actions = self._policy, self.mode.random_actions
        lanes = idle_lanes(self.envs, self._width) if self._external is None else self._external.asking
        faults = policy.faults(lanes, random_actions=random_actions)
        return [Failure(int(lanes[position]), error, stepped=True) for position, error in faults]

    def act(self, weights_seq: int) -> None:
        if self._external is not None:
            self._answer_callers(self._external, weights_seq)
        elif self._in_step:
            self._act_together(weights_seq)
        else:
            self._act_when_ready(weights_seq)

    def _act_together(self, weights_seq: int) -> None:
        self._live, fragment = self.envs.live, self.fragment
        if fragment.split is not None and fragment.split is not self._policy.split:
            fragment.complete_steps()  # another module acts now
        fragment.aim(self._live)
        columns = self._choose(self._live, weights_seq, whole=fragment.split is None)
        fragment.put(columns, weights_seq)
        self.envs.send_actions(columns)

    def _act_when_ready(self, weights_seq: int) -> None:
        acting = next_to_act(self.envs, self._width)
        if not len(acting):
            return
        self.fragment.aim(acting)
        columns = self._choose(acting, weights_seq)
        self.fragment.put(columns, weights_seq)
        self.envs.send_actions(columns, acting)

    def _choose(self, acting: Rows | None, weights_seq: int, *, whole: bool = True) -> Columns:
        mode, act = self.mode, self._policy.act
        if self.timers is not None and not mode.random_actions:
            act = self.timers.timed("rlmodule_inference_timer", act)
        try:
            return act(
                acting, explore=mode.explore, random_actions=mode.random_actions, whole=whole, weights_seq=weights_seq
            )
        except ConnectorError:
            self._is_spoilt = self._policy.remembers  # the memory holds a step that will not be taken
            raise

    def _answer_callers(self, callers: ExternalDriver, weights_seq: int) -> None:
        """Send the actions before recording the step, so that the caller does not wait for the record."""
        acting, envs = callers.asking, self.envs
        if not len(acting):
            return
        columns = {**self._choose(acting, weights_seq), OFF_POLICY: self._on_policy}
        logged = callers.logged(acting)
        if logged:
            columns = put_logged(columns, logged, self._policy.module, envs.spaces.action)
        self._is_spoilt = True  # reset below: an action that was sent must also be recorded
        envs.send_actions(columns, acting)
        self.fragment.aim(acting)
        self.fragment.put(columns, weights_seq)
        self._is_spoilt = False

    def take(self) -> Outcome | None:
        poll = self.envs.poll if self.timers is None else self.timers.timed("env_step_timer", self.envs.poll)
        outcome = poll() if self._steps_inline else self._totals.timers.budget.of_envs(poll)
        if self.answered is not None:
            self.answered += len(outcome.rewards)
            if not len(outcome.rewards):
                return None
        if outcome.failures:
            self._look_at_actions([f for f in outcome.failures if f.reason is Discard.ENV_EXCEPTION and not f.stepped])
        if self._policy.connectors.sees:
            self._chosen = self.fragment.chosen(outcome.lanes, self._policy.connectors.actions)
        self.fragment.answer(outcome.lanes, outcome.rewards)
        self.reset_polls += outcome.resets
        return outcome

    def _look_at_actions(self, failures: Sequence[Failure]) -> None:
        """Note where an env raised at an action outside its space: that is the policy's doing, and no fault of the env.

        Envs of a vector that fails as a whole share one error.
        """
        space, root = self._policy.env_spaces.action, action_root(self.fragment.columns)
        names = [name for name, _ in leaves(space, root)]
        for failure in failures:
            lanes = np.array([other.lane for other in failures if other.error is failure.error])
            sent = self.fragment.chosen(lanes, [*names, "weights_seq"])
            if problem := ActionLimits(space, root, boxes=True).problem(sent):
                who = f"policy weights {sent['weights_seq'][0]} gave it {problem}"
                failure.hint = f"{who}; let module_to_env = ClipActions, or the module's actions_for_env, clip them"

    def is_spoilt_by(self, error: BaseException) -> bool:
        spoilt, self._is_spoilt = self._is_spoilt, False
        return spoilt

    def count(self, outcome: Outcome) -> None:
        totals, stepped = self._totals, len(outcome.rewards)
        totals.open += stepped
        totals.stepped += stepped
        if outcome.failures:
            totals.stepped -= sum(not failure.stepped for failure in outcome.failures)
        totals.env_steps = totals.stepped

    def record(self, outcome: Outcome) -> None:
        if self._policy.connectors.sees:
            show = self._show if self.timers is None else self.timers.timed("env_to_module_timer", self._show)
            self._is_spoilt = True  # reset below, as in `begin`
            show(outcome)
            self._is_spoilt = False
        for lane, info in outcome.infos:
            self._take_info(lane, info)

    def _show(self, outcome: Outcome) -> None:
        """Pass the new observations through env_to_module, including the last ones of episodes that end."""
        lanes, chosen, rewards = outcome.lanes, self._chosen, outcome.rewards
        if lanes is None:
            lanes = np.arange(self._width) if self._live is None else self._live
        if outcome.failures:
            sound = ~np.isin(lanes, [failure.lane for failure in outcome.failures])
            lanes, rewards = lanes[sound], rewards[sound]
            chosen = {name: rows[sound] for name, rows in chosen.items()}
        if len(lanes):
            self._policy.connectors.stepped(lanes, chosen, rewards)

    def stepped(self, outcome: Outcome) -> Iterable[tuple[Lane, Episode]]:
        lanes = self.envs.lanes if outcome.lanes is None else [self.envs.lanes[i] for i in outcome.lanes.tolist()]
        return [(lane, lane.episode) for lane in lanes if lane.episode is not None]

    def over(self, outcome: Outcome) -> dict[int, ChunkEnd]:
        return dict(outcome.ended) if outcome.ended else {}

    def withdraw(self, outcome: Outcome, lane: Lane) -> None:
        outcome.ended = [(index, end) for index, end in outcome.ended if index != lane.index]

    def end(self, outcome: Outcome) -> None:
        if outcome.ended:
            self.fragment.end(outcome.ended)

    # -- steps that are lost ------------------------------------------------------------------------------------------

    def lose(self, failure: Failure, *, recorded: bool) -> None:
        lost = self.fragment.abort(failure.lane)
        assert lost is not None, "only an env with an episode is stepped"
        episode, rows = lost
        if self._totals.kept is not None and not recorded and self._external is None:
            first = self.fragment.cursor(failure.lane)  # its chunk's first row again, whose steps are still there
            where = failure.lane, slice(first, first + rows)
            failure.episode = self._totals.kept.trail.of(episode, self.fragment.columns, where, self._shows_all)
        failure.discarded = rows if failure.stepped else rows - 1
        failure.at = f"step {episode.steps + rows} of episode {self._id_high:016x}{episode.id_low:016x}"
        self._totals.open -= rows
        self._totals.discard(failure.reason, failure.discarded)
        if episode.chunks:
            self._markers.append(Marker(episode, failure.reason))

    @property
    def _shows_all(self) -> bool:
        """Return whether the columns have the observations as the env gave them."""
        return not self._policy.connectors.sees

    def lose_open(self, reason: Discard) -> None:
        self._policy.drop_chosen(None)
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

    def lose_ended(self, reason: Discard) -> None:
        ended = self._fragment.ended if self._fragment is not None else []
        self._markers += [Marker(chunk.episode, reason) for chunk in ended if chunk.episode.chunks]
        self._totals.discard(reason, self._totals.open)
        self._totals.open = 0
        self._fragment = None

    def drop_markers(self) -> None:
        self._markers = []

    def rebuild(self, config: EnvRunnerConfig) -> None:
        self.envs.build(config)
        earlier, self._policy = self._policy, self._new_policy(config)
        self._policy.take_connectors_of(earlier)

    # -- the end of a fragment ----------------------------------------------------------------------------------------

    def cut(self, stamp: Stamp, *, keep_open: bool) -> tuple[Sequence[OpenChunk], ChunkBatch]:
        """Return the chunks to deliver, and a batch with those chunks as its first rows and then the end markers."""
        fragment, markers = self.fragment, self._markers
        chunks, self._fragment = fragment.take_chunks(sorted(self.envs.under_way), keep_open=keep_open)
        delivered = keep_back(fragment, chunks, self._totals, self.envs.lanes)
        if len(delivered) != len(chunks):
            over = [chunk.episode for chunk in chunks if chunk.end is not ChunkEnd.ONGOING]
            self._untrained += [(episode.episode_return, episode.steps) for episode in over if not episode.trains]
        self._markers = []
        batch = cut(fragment, delivered, markers, self._policy.spaces, stamp)
        if self._totals.kept is not None:
            self._totals.kept.trail.add(batch.arrays, delivered, self._shows_all)
        count_cut(batch, delivered, self._totals, self.envs.lanes)
        self._totals.env_steps_delivered = self._totals.delivered
        return delivered, batch

    def take_untrained(self) -> list[tuple[float, int]]:
        """Return (return, length) of each episode without training that has ended since the last call."""
        untrained, self._untrained = self._untrained, []
        return untrained

    # -- random streams -----------------------------------------------------------------------------------------------

    def read_streams(self) -> dict[str, Any]:
        lanes = self.envs.lanes
        unstepped = [not len(self.look(lane, lane.episode)) if lane.episode else False for lane in lanes]
        if not self.envs.seeds_every_episode:
            unstepped = [False] * len(unstepped)  # such a vector cannot repeat an episode that it began
        return {"lanes": read_lanes(lanes, unstepped), **self._policy.noise.read()}

    def accept_streams(self, state: Mapping[str, Any]) -> Callable[[], None]:
        lanes, noise = self.envs.lanes, self._policy.noise
        check_lanes(lanes, state.get("lanes"))
        noise.check(state)

        def write() -> None:
            write_lanes(lanes, state["lanes"])
            noise.write(state)

        return write
