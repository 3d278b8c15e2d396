"""Multi-agent envs that are objects of this process, stepped one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.accounts.user_calls import UserCall
from headrace.schemas.basics.stop_event import raise_stop
from headrace.schemas.errors import ConnectorError, EnvContractError
from headrace.workers.agents.acting_seats import ActingSeats
from headrace.workers.agents.env import AgentDict, build_multi_agent_env, gym_spaces_of, spaces_by_agent
from headrace.workers.agents.episodes import MultiAgentEpisode
from headrace.workers.agents.lane_report import read_reset
from headrace.workers.agents.seating import Seating
from headrace.workers.agents.vector import AgentSource, Gathered, LaneAnswer
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.context import EnvContext
from headrace.workers.envs.creators import EnvCreator
from headrace.workers.envs.driver import Pace
from headrace.workers.envs.failures import Failure
from headrace.workers.envs.inline import BuiltEnvs, check_inline
from headrace.workers.envs.lane import Lane
from headrace.workers.envs.lane_table import LaneTable
from headrace.workers.envs.recovery import LaneRecovery
from headrace.workers.envs.rendering import render_at
from headrace.workers.envs.sequential_step import Outcome
from headrace.workers.envs.task_reset import reset_with
from headrace.workers.policy.policies import PolicyMappingError

_STEPPED = Outcome(np.empty(0), [], [])
"""The outcome of a step in which no env raised: the envs' answers tell the rest."""


class InlineAgents(AgentSource):
    """An `AgentSource` whose envs are objects of this process.

    Agents get their seats when their env is reset. `first` is an env 0 that was built to learn what kind of env it is.
    """

    pace = Pace.LOCK_STEP

    def __init__(self, table: LaneTable, seating: Seating, first: Any = None) -> None:
        self.lanes = table.lanes
        self.halves: list[NDArray[np.intp]] = []
        self._table = table
        self._seating = seating
        self._recovery = LaneRecovery(table, self._rebuild, self._take_down)
        self._sent: Mapping[int, AgentDict] = {}
        self._answers: dict[int, Any] = {}
        """The reply of each lane's env to its last step."""
        self._envs: BuiltEnvs | None = None
        self.build(table.config, first)

    # -- building -----------------------------------------------------------------------------------------------------

    def build(self, config: EnvRunnerConfig, first: Any = None) -> None:
        check_inline(config)
        self._table.config = config
        self.stop()
        self._envs = BuiltEnvs(self._table, self, first)
        try:
            for lane, slot in zip(self.lanes, self._envs.slots, strict=True):
                lane.due_at, lane.env = None, slot.env
                lane.seeds.renew()
            for lane in self.lanes:
                self._table.tell_created(lane.index)
        except BaseException:
            self.stop()
            raise

    def make_env(self, creator: EnvCreator, context: EnvContext) -> Any:
        """Return one env in the dict protocol, as `EnvKind` does."""
        return build_multi_agent_env(creator, context)

    def learn_spaces(self, first: Any) -> None:
        """Use the agents of env 0 for all envs."""
        gym_spaces = gym_spaces_of(first)
        by_agent, note_outside = spaces_by_agent(gym_spaces), self._table.note_outside
        self._seating.learn(by_agent, gym_spaces, check_bounds=True, makes_rows=False, note_outside=note_outside)

    def check_spaces(self, env: Any, index: int) -> None:
        """Raise `EnvContractError` unless env `index` has the agents of env 0, with their spaces."""
        spaces, known = spaces_by_agent(gym_spaces_of(env)), self._seating.agent_spaces
        if spaces != known:
            different = [a for a in {**known, **spaces} if spaces.get(a) != known.get(a)]
            seen = {agent: spaces.get(agent) for agent in different[:2]}
            wanted = {agent: known.get(agent) for agent in different[:2]}
            raise EnvContractError(f"spaces of env {index}", f"{seen!r:.300}", f"those of env 0, {wanted!r:.300}")

    @property
    def _built(self) -> BuiltEnvs:
        assert self._envs is not None, "build() makes them"
        return self._envs

    def stop(self) -> None:
        self._recovery.stop()
        if self._envs is not None:
            self._envs.close()

    # -- steps --------------------------------------------------------------------------------------------------------

    def send(self, actions: Mapping[int, AgentDict]) -> None:
        """Set the actions for the next `poll`: lane index -> the actions of its agents."""
        self._sent = actions

    def poll(self) -> Outcome:
        """Step the envs of all lanes that were sent actions."""
        failures: list[Failure] = []
        slots, answers, calls = self._built.slots, self._answers, self._table.totals.calls
        words, is_slow = calls.words, calls.is_slow
        words[0] = UserCall.STEP
        if calls.sides is not None:
            calls.sides.enter()
        for index, own in self._sent.items():
            words[1] = index
            try:
                answers[index] = slots[index].step(own)
            except BaseException as error:  # noqa: BLE001 - a user's env
                raise_stop(error)
                failures.append(Failure(index, error))
            if is_slow:
                calls.between()
        calls.end_steps()
        return Outcome(_STEPPED.rewards, [], failures) if failures else _STEPPED

    def answers(self, acting: ActingSeats, outcome: Outcome, gathered: Gathered) -> Iterator[LaneAnswer]:
        """Yield the reply of each lane. Add failures to `gathered` in the order of lanes."""
        failed = {failure.lane: failure for failure in outcome.failures}
        for lane, episode in acting.lanes:
            if lane.index in failed:
                gathered.failures.append(failed[lane.index])
            else:
                yield lane, episode, self._answers.pop(lane.index)

    # -- episodes -----------------------------------------------------------------------------------------------------

    def try_reset(self, lanes: Sequence[int]) -> None:
        """Begin an episode in each of `lanes`, each with its next seed, if any. Failures wait for `try_restart`.

        Raises `PolicyMappingError`, and `ConnectorError` for an agent that a connector has no room for.
        """
        begun: list[tuple[Lane, MultiAgentEpisode, AgentDict]] = []
        for index in lanes:
            lane = self.lanes[index]
            if lane.env is None:
                continue
            episode = self._table.create_episode(lane, MultiAgentEpisode)
            try:
                if self.on_episode_created is not None:
                    self.on_episode_created(lane, episode)
                with self._table.totals.calls.of(UserCall.RESET, index):
                    values = None if episode.task is None else episode.task.values
                    answer = reset_with(lane.env, episode.reset_seed, values)
                first, episode.reset_info = read_reset(answer, self._seating.agents)
                tell = self._table.tell
                episode.reset_info = {agent: tell(info) for agent, info in episode.reset_info.items()}
            except BaseException as error:  # noqa: BLE001 - a user's env
                raise_stop(error)
                self._table.failed.append(Failure(index, error, unbegun=episode))
                continue
            begun.append((lane, episode, first))
            self._table.totals.calls.between()
        try:
            bad = self._seating.seat_first((episode, first) for _, episode, first in begun)
        except (PolicyMappingError, ConnectorError):
            for lane, episode, _ in begun:  # to be abandoned
                lane.episode = episode
            raise
        for lane, episode, _ in begun:
            if lane.index in bad:
                episode.seats = {}
                self._table.failed.append(Failure(lane.index, bad[lane.index], unbegun=episode))
                continue
            lane.episode = episode
            self._table.started.append(lane.index)
        self._recovery.refresh()

    # -- failures -----------------------------------------------------------------------------------------------------

    def _take_down(self, lane: Lane) -> None:
        lane.release()
        self._built.close_env(lane.index)
        self._seating.blank(lane.index)

    def _rebuild(self, lane: Lane) -> None:
        if self.on_rebuild is not None:
            self.on_rebuild()
        try:
            self._built.rebuild(lane.index)
            lane.env = self._built.slots[lane.index].env
            self._table.tell_created(lane.index)
        except BaseException as error:  # noqa: BLE001 - a user's env
            raise_stop(error)
            self._table.failed.append(Failure(lane.index, error, at="construction"))
            return
        self.try_reset([lane.index])

    def try_render_at(self, index: int) -> NDArray[np.uint8] | None:
        with self._table.totals.calls.of(UserCall.RENDER, index):
            return render_at(self.lanes[index].env, index)
