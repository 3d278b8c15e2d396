"""Lanes of multi-agent envs, wherever those are: who sits where, and what a step means for the seats."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from headrace.schemas.chunk import format_episode_id
from headrace.schemas.errors import ConnectorError
from headrace.schemas.spaces import Spaces
from headrace.workers.agents.answers import LaneReport, check_idle, is_plain, read_step
from headrace.workers.agents.env import AgentDict
from headrace.workers.agents.episodes import AgentEpisode, MultiAgentEpisode, Seat
from headrace.workers.agents.module_seats import ModuleSeats
from headrace.workers.agents.outcomes import StepOutcome, apply_reports
from headrace.workers.agents.turns import Turn, parts_of, turn_of
from headrace.workers.callbacks import CallbackList
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.checks import check_rewards, take_apart
from headrace.workers.envs.failures import Failure
from headrace.workers.envs.lane import Lane
from headrace.workers.envs.lanes import Lanes
from headrace.workers.envs.roster import Roster
from headrace.workers.metrics.totals import RunnerTotals
from headrace.workers.policy.policies import NO_EPISODE, Policies, PolicyMappingError
from headrace.workers.randomness.seeds import SeedTree


@dataclass(slots=True, eq=False)
class Gathered:
    """What lanes answered in one poll, one after another: plain lanes first, then those with a report."""

    sent: dict[int, AgentDict] = field(default_factory=dict)
    seats: list[Seat] = field(default_factory=list)
    observations: list[Any] = field(default_factory=list)
    rewards: list[Any] = field(default_factory=list)
    reports: list[LaneReport] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)


class AgentSeats(Roster):
    """Lanes of multi-agent envs. `modules` hold what their seats see; `policies` say who plays whom."""

    def __init__(
        self,
        config: EnvRunnerConfig,
        worker_index: int,
        seeds: SeedTree,
        totals: RunnerTotals,
        policies: Policies,
        id_high: int,
        callbacks: CallbackList,
        **further: Any,
    ) -> None:
        self.policies = policies
        self._seeds, self._id_high = seeds, id_high
        super().__init__(config, worker_index, seeds, totals, callbacks, **further)

    def _learn_agents(
        self, spaces: Mapping[Any, Spaces], gym_spaces: Mapping[Any, tuple[Any, Any]], *, check_bounds: bool
    ) -> None:
        """The envs were built anew: these are the agents of each, with modules that nobody sits at yet."""
        self.agents: dict[Any, int] = {agent: i for i, agent in enumerate(spaces)}
        self.agent_spaces, self.agent_gym_spaces = dict(spaces), dict(gym_spaces)
        self.modules = {
            module_id: ModuleSeats(
                module_id,
                index,
                self.policies.specs[module_id],
                own,
                len(self.lanes),
                self._seeds,
                check_bounds=check_bounds,
            )
            for index, (module_id, own) in enumerate(self.policies.spaces(self.agent_spaces).items())
        }
        self._may_play = {
            agent: {module_id for module_id, module in self.modules.items() if module.env_spaces == own}
            for agent, own in self.agent_spaces.items()
        }

    # -- one step -----------------------------------------------------------------------------------------------------

    def _conclude(self, turn: Turn, gathered: Gathered) -> StepOutcome:
        """Take in what the lanes of `turn` answered.

        Raises `PolicyMappingError` for a newcomer that cannot be mapped, and `ConnectorError` for one that a connector
        has no room for; nothing of the poll counts then.
        """
        plain, owners = len(gathered.rewards), [seat.episode.env_index for seat in gathered.seats]
        try:
            newcomers = self._seat_newcomers(gathered.reports)
        except (PolicyMappingError, ConnectorError):
            _undo(turn, gathered)
            raise
        for report, new in zip(gathered.reports, newcomers, strict=True):
            gathered.seats += report.observed + new
            gathered.observations += report.observations + [observation for _, observation in report.newcomers]
            gathered.rewards += [reward for _, reward in report.rewards]
            owners += [report.episode.env_index] * len(report.rewards)
        rewards, problems = check_rewards(gathered.rewards, owners, gathered.sent)  # type: ignore[arg-type]
        bad: dict[int, Exception] = {owners[place]: error for place, error in reversed(problems)}
        bad |= self._take_in(gathered.seats, gathered.observations)
        gathered.failures += [Failure(lane, error, stepped=True) for lane, error in bad.items()]
        outcome = StepOutcome(gathered.seats[:plain], rewards[:plain], gathered.failures)
        if bad:
            good = [i for i, seat in enumerate(outcome.answered) if seat.episode.env_index not in bad]
            outcome.answered, outcome.rewards = [outcome.answered[i] for i in good], outcome.rewards[good]
        apply_reports(outcome, zip(gathered.reports, newcomers, strict=True), rewards[plain:].tolist(), bad)
        return outcome

    def _gather(self, answers: Iterable[tuple[Lane, MultiAgentEpisode, Any]], gathered: Gathered) -> Gathered:
        seats, observations, rewards = gathered.seats, gathered.observations, gathered.rewards
        for lane, episode, answer in answers:
            episode.t += 1
            if episode.is_plain and is_plain(answer, episode.agents):
                seats += episode.acting
                observations += answer[0].values()
                rewards += answer[1].values()
                continue
            try:
                check_idle(episode, self._config.max_idle_env_steps)
                report = read_step(episode, answer, self.agents, self._config.missing_final_observation)
            except Exception as error:  # noqa: BLE001 - what a user's env answers has methods of its own
                gathered.failures.append(Failure(lane.index, take_apart(answer, error), stepped=True))
                continue
            gathered.reports.append(report)
        return gathered

    def _take_in(self, seats: Sequence[Seat], observations: Sequence[Any]) -> dict[int, Exception]:
        """Write what the seats see; gives what is wrong by lane."""
        bad: dict[int, Exception] = {}
        for part in parts_of(seats):
            for place, error in part.module.observations.put(part.rows, part.of(observations)):
                bad.setdefault(part.of(seats)[place].episode.env_index, error)
        return bad

    # -- episodes -----------------------------------------------------------------------------------------------------

    def _make_rows(self) -> None:
        """Each agent has its rows from the beginning, as far as the mapping knows it before any episode.

        Else the width of a pass, and so how it rounds, would depend on who was ready first.
        """
        for agent, index in self.agents.items():
            with suppress(PolicyMappingError):
                module_id = self.policies.module_of(agent, NO_EPISODE)
                if module_id in self._may_play[agent]:
                    self.modules[module_id].row_of(0, index)

    def _seat_first(self, begun: Iterable[tuple[MultiAgentEpisode, AgentDict]]) -> None:
        """Seat those who are seen first in episodes that have begun: which, and what they see.

        Raises `PolicyMappingError`, and `ConnectorError` for an agent that a connector has no room for.
        """
        seats: list[Seat] = []
        seen: list[Any] = []
        for episode, first in begun:
            episode.let_act([self._seat(episode, agent) for agent in first])
            episode.seats = {seat.agent: seat for seat in episode.acting}
            seats += episode.acting
            seen += first.values()
        self._take_in(seats, seen)

    def _seat_newcomers(self, reports: Sequence[LaneReport]) -> list[list[Seat]]:
        return [[self._seat(report.episode, agent) for agent, _ in report.newcomers] for report in reports]

    def _seat(self, whole: MultiAgentEpisode, agent: Any) -> Seat:
        """The agent's seat in an episode in which it appears for the first time."""
        episode_id = format_episode_id(self._id_high, whole.id_low)
        module = self.modules[self.policies.module_of(agent, episode_id)]
        if module.module_id not in self._may_play[agent]:
            built_for = f"was mapped to {module.module_id!r}, which was built for other spaces"
            seen = f"{built_for}, {module.env_spaces!r:.200} and not {self.agent_spaces[agent]!r:.200}"
            raise PolicyMappingError(agent, seen, self.policies.specs)
        episode = AgentEpisode(
            whole.env_index, whole.number, whole.seed, {}, whole.started_at, agent=str(agent), whole=whole
        )
        return Seat(agent, module, module.row_of(whole.env_index, self.agents[agent]), episode)


class MultiAgentLanes(AgentSeats, Lanes):
    """Those whose envs can be stepped all at once, and fail each by itself."""

    _turn: Turn | None = None

    def _blank(self, lane: Lane) -> None:
        for module in self.modules.values():
            module.blank(lane.index)

    def turn(self) -> Turn:
        """Who acts in the next poll."""
        if self._turn is None:
            self._turn = turn_of(self._live)
        return self._turn

    def _refresh(self) -> None:
        super()._refresh()
        self._turn = None

    def step(self, turn: Turn, actions: Sequence[Any]) -> StepOutcome:
        """Step every live lane with the actions of its seats (in the order of `turn.seats`) and take in the answers.

        Raises as `_conclude` does.
        """
        gathered = Gathered()
        answers = self._answers(turn, actions, gathered.sent, gathered.failures)
        outcome = self._conclude(turn, self._gather(answers, gathered))
        if gathered.reports or gathered.failures:
            self._turn = None
        else:
            turn.env_t += 1
        return outcome

    @abstractmethod
    def _answers(
        self, turn: Turn, actions: Sequence[Any], sent: dict[int, AgentDict], failures: list[Failure]
    ) -> Iterator[tuple[Lane, MultiAgentEpisode, Any]]:
        """Step each lane of `turn`; what those answered that did. `failures` gets what became of the others.

        `sent` gets what each lane's agents do. A lane that was stepped and failed all the same has its `t` counted.
        """


def _undo(turn: Turn, gathered: Gathered) -> None:
    """No step of the poll counts: nobody's action hangs that did not before, and no episode is longer."""
    raised = {failure.lane for failure in gathered.failures if not failure.stepped}
    for lane, episode in turn.lanes:
        episode.t -= lane.index not in raised
        for seat in episode.acting:
            seat.hangs = False
