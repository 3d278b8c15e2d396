"""The multi-agent vector: a step of envs in the dict protocol, and its effect on the seats of their agents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.basics.stop_event import raise_stop
from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.errors import ConnectorError
from headrace.workers.agents.acting_seats import ActingSeats, acting_seats
from headrace.workers.agents.env import AgentDict
from headrace.workers.agents.episodes import MultiAgentEpisode, Seat
from headrace.workers.agents.lane_report import LaneReport, check_idle, is_plain, read_step
from headrace.workers.agents.seating import Seating
from headrace.workers.envs.checks import check_rewards, take_apart
from headrace.workers.envs.driver import LaneDriver
from headrace.workers.envs.failures import Failure
from headrace.workers.envs.lane import Lane
from headrace.workers.envs.lane_table import LaneTable
from headrace.workers.envs.sequential_step import Outcome
from headrace.workers.policy.policies import PolicyMappingError

LaneAnswer = tuple[Lane, MultiAgentEpisode, Any]
"""A lane, its episode, and (observations, rewards, terminateds, truncateds, infos) of its step."""


@dataclass(slots=True, eq=False)
class Gathered:
    """The answers of lanes in one poll, one after another: plain lanes first, then those with a report."""

    sent: Mapping[int, AgentDict]
    """The actions of each lane's agents."""
    seats: list[Seat] = field(default_factory=list)
    observations: list[Any] = field(default_factory=list)
    rewards: list[Any] = field(default_factory=list)
    reports: list[LaneReport] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)


class AgentSource(LaneDriver, Protocol):
    """Multi-agent envs that speak in dicts by agent id, and their lanes."""

    def send(self, actions: Mapping[int, AgentDict]) -> None:
        """Step lanes, by index, with the actions of their agents."""

    def poll(self) -> Outcome:
        """Return the lanes that have stepped or failed. In lock-step it waits for all lanes."""

    def answers(self, acting: ActingSeats, outcome: Outcome, gathered: Gathered) -> Iterator[LaneAnswer]:
        """Yield the reply of each lane of `acting` that has one. Add the failures of `outcome` to `gathered.failures`.

        A failed lane whose env took the step has its `t` counted.
        """


class MultiAgentVector:
    """The steps of `envs` of several agents, from `source`, whose agents have their seats in `seating`.

    In lock-step call `step` once a poll. Where each env has its own pace, `send` steps some lanes, and `take` returns
    the lanes that have replied.
    """

    def __init__(self, source: AgentSource, seating: Seating, table: LaneTable) -> None:
        self.envs = source
        self.seating = seating
        self._source = source
        self._table = table
        self._acting: ActingSeats | None = None
        self._sent: dict[int, AgentDict] = {}
        """The last actions of each lane's agents."""

    def acting(self) -> ActingSeats:
        """Return the seats that act in the next `step`."""
        live, lanes = self.envs.live, self.envs.lanes
        self._acting = acting_seats(lanes if live is None else [lanes[index] for index in live.tolist()], self._acting)
        return self._acting

    def step(self, acting: ActingSeats, actions: Sequence[Any]) -> StepOutcome:
        """Step every live lane with the actions of its seats, in the order of `acting.seats`. Return the outcome.

        Raises `PolicyMappingError` for a newcomer that cannot be mapped, and `ConnectorError` for a newcomer that a
        connector has no room for. After either error nothing of the step counts.
        """
        self._sent = acting.by_lane(actions)
        self._source.send(self._sent)
        return self._conclude(acting, self._source.poll())

    def send(self, acting: ActingSeats, actions: Sequence[Any]) -> None:
        """Send the seats' `actions` to the lanes of `acting`, which are live and not under way. Returns at once."""
        for _, episode in acting.lanes:
            episode.under_way = True
        sent = acting.by_lane(actions)
        self._sent |= sent
        self._source.send(sent)

    def take(self) -> tuple[ActingSeats, StepOutcome]:
        """Return the seats whose lanes have replied, and the outcome. Waits as `EnvDriver.poll`, raises as `step`."""
        outcome = self._source.poll()
        assert outcome.lanes is not None, "envs with a pace of their own say which lanes have answered"
        acting = acting_seats([self.envs.lanes[index] for index in outcome.lanes.tolist()])
        for _, episode in acting.lanes:
            episode.under_way = False
        return acting, self._conclude(acting, outcome)

    def _conclude(self, acting: ActingSeats, stepped: Outcome) -> StepOutcome:
        """Return the outcome of the replies of the lanes of `acting`, and apply it to the seats."""
        gathered = Gathered(self._sent)
        self._gather(self._source.answers(acting, stepped, gathered), gathered)
        plain, owners = len(gathered.rewards), [seat.episode.env_index for seat in gathered.seats]
        try:
            newcomers = self._seat_newcomers(gathered.reports)
        except (PolicyMappingError, ConnectorError):
            _undo(acting, gathered)
            raise
        for report, new in zip(gathered.reports, newcomers, strict=True):
            gathered.seats += report.observed + new
            gathered.observations += report.observations + [observation for _, observation in report.newcomers]
            gathered.rewards += [reward for _, reward in report.rewards]
            owners += [report.episode.env_index] * len(report.rewards)
        rewards, problems = check_rewards(gathered.rewards, owners, gathered.sent)  # type: ignore[arg-type]
        bad: dict[int, Exception] = {owners[place]: error for place, error in reversed(problems)}
        bad |= self.seating.show(gathered.seats, gathered.observations)
        gathered.failures += [Failure(lane, error, stepped=True) for lane, error in bad.items()]
        outcome = StepOutcome(gathered.seats[:plain], rewards[:plain], gathered.failures)
        if bad:
            good = [i for i, seat in enumerate(outcome.answered) if seat.episode.env_index not in bad]
            outcome.answered, outcome.rewards = [outcome.answered[i] for i in good], outcome.rewards[good]
        apply_reports(outcome, zip(gathered.reports, newcomers, strict=True), rewards[plain:].tolist(), bad)
        return outcome

    def _gather(self, answers: Iterable[LaneAnswer], gathered: Gathered) -> None:
        config, tell = self._table.config, self._table.tell
        seats, observations, rewards = gathered.seats, gathered.observations, gathered.rewards
        for lane, episode, answer in answers:
            episode.t += 1
            if episode.is_plain and is_plain(answer, episode.agents):
                seats += episode.acting
                observations += answer[0].values()
                rewards += answer[1].values()
                continue
            try:
                check_idle(episode)
                report = read_step(episode, answer, self.seating.agents, config.missing_final_observation)
                report.infos = [(agent, tell(info)) for agent, info in report.infos]
            except BaseException as error:  # noqa: BLE001 - the methods of a user's objects may raise
                raise_stop(error)
                gathered.failures.append(Failure(lane.index, take_apart(answer, error), stepped=True))
                continue
            gathered.reports.append(report)

    def _seat_newcomers(self, reports: Sequence[LaneReport]) -> list[list[Seat]]:
        seat = self.seating.seat
        return [[seat(report.episode, agent) for agent, _ in report.newcomers] for report in reports]


def _undo(acting: ActingSeats, gathered: Gathered) -> None:
    """Undo the poll's counts: no action is pending because of it, and no episode is longer."""
    raised = {failure.lane for failure in gathered.failures if not failure.stepped}
    for lane, episode in acting.lanes:
        episode.t -= lane.index not in raised
        for seat in episode.acting:
            seat.pending = False


@dataclass(slots=True, eq=False)
class StepOutcome:
    """The outcome of one step of every live lane for the seats. Lanes that failed have no part in it."""

    answered: list[Seat]
    rewards: NDArray[np.float64]
    """One for each of `answered`: the sum since the agent acted."""
    failures: list[Failure]
    newcomers: list[Seat] = field(default_factory=list)
    ended: list[tuple[Seat, ChunkEnd]] = field(default_factory=list)
    unseen: list[Seat] = field(default_factory=list)
    """Seats of `answered` that are done and got no last observation."""
    dropped: list[Seat] = field(default_factory=list)
    repeated: int = 0
    infos: list[tuple[Seat, dict[str, Any]]] = field(default_factory=list)
    begun: bool = False
    """Always False: episodes begin between two polls."""
    over: dict[int, ChunkEnd] = field(default_factory=dict)
    """Lane -> how its episode ended, for lanes whose episode is over."""


def apply_reports(
    outcome: StepOutcome,
    reports: Iterable[tuple[LaneReport, list[Seat]]],
    rewards: Sequence[float],
    bad: Mapping[int, Exception],
) -> None:
    """Apply the reports of lanes that are not `bad` to their seats, and add them to the outcome."""
    totals: list[float] = []
    at = 0
    for report, newcomers in reports:
        values = rewards[at : at + len(report.rewards)]
        at += len(values)
        if report.episode.env_index in bad:
            continue
        _seat_all(report.episode, newcomers)
        _add_rewards(report, values)
        for seat in report.answered:
            totals.append(seat.reward)
            seat.reward, seat.pending = 0.0, False
        for seat in report.unseen:
            seat.episode.observed_more -= 1
        for seat, end in report.ended:
            seat.end = end
        report.episode.let_act([seat for seat in (*report.observed, *newcomers) if not seat.done])
        outcome.answered += report.answered
        outcome.unseen += report.unseen
        outcome.newcomers += newcomers
        outcome.ended += report.ended
        outcome.dropped += report.dropped
        outcome.repeated += report.repeated
        seats = report.episode.seats
        outcome.infos += [(seats[agent], info) for agent, info in report.infos if agent in seats]
        if report.end is not ChunkEnd.ONGOING:
            outcome.over[report.episode.env_index] = report.end
    if totals:
        outcome.rewards = np.concatenate((outcome.rewards, totals))


def _seat_all(episode: MultiAgentEpisode, newcomers: Sequence[Seat]) -> None:
    for seat in newcomers:
        episode.seats[seat.agent] = seat
        seat.episode.observed_more += 1
        seat.reward = episode.early_rewards.pop(seat.agent, 0.0)


def _add_rewards(report: LaneReport, values: Sequence[float]) -> None:
    episode = report.episode
    for (agent, _), value in zip(report.rewards, values, strict=True):
        seat = episode.seats.get(agent)
        if seat is not None:
            seat.reward += value
        else:
            episode.early_rewards[agent] = episode.early_rewards.get(agent, 0.0) + value
