"""The multi-agent vector: envs in the dict protocol, the seats of their agents, and the effect of a step on seats."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.chunks.spaces import Spaces
from headrace.schemas.errors import ConnectorError
from headrace.workers.agents.acting_seats import ActingSeats, acting_seats
from headrace.workers.agents.env import AgentDict
from headrace.workers.agents.episodes import Seat
from headrace.workers.agents.lane_report import LaneReport, check_idle, is_plain, read_step
from headrace.workers.agents.module_seats import ModuleSeats
from headrace.workers.agents.seating import Seating
from headrace.workers.agents.source import AgentSource, Gathered, LaneAnswer
from headrace.workers.agents.step_outcome import StepOutcome, apply_reports
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.backend import EnvHostsHere
from headrace.workers.envs.checks import check_rewards, take_apart
from headrace.workers.envs.driver import StartEpisodes
from headrace.workers.envs.failures import Failure
from headrace.workers.envs.lane import Episode, Lane
from headrace.workers.envs.lane_table import LaneTable
from headrace.workers.envs.pace import Pace
from headrace.workers.envs.sequential_step import Outcome
from headrace.workers.policy.policies import Policies, PolicyMappingError


def part_of(owner: str, name: str) -> Any:
    """Return a property that reads and writes `self.<owner>.<name>`, to be used instead of inheritance."""

    def write(whole: Any, value: Any) -> None:
        setattr(getattr(whole, owner), name, value)

    return property(attrgetter(f"{owner}.{name}"), write)


class MultiAgentVector:
    """Envs of several agents, from `source`, with the seats of their agents.

    In lock-step call `step` once a poll. Where each env has its own pace, `send` steps some lanes, and `take` returns
    the lanes that have replied. `lanes`, `live`, `try_reset` and so on are those of the envs.
    """

    def __init__(self, source: AgentSource, seating: Seating, table: LaneTable) -> None:
        self._source = source
        self._envs = source.envs
        self._seating = seating
        self._table = table
        self._acting: ActingSeats | None = None
        self._sent: dict[int, AgentDict] = {}
        """The last actions of each lane's agents."""
        self.lanes: list[Lane] = source.envs.lanes

    # -- the agents ---------------------------------------------------------------------------------------------------

    modules: dict[str, ModuleSeats] = part_of("_seating", "modules")
    """Module id -> the seats that the module plays."""
    policies: Policies = part_of("_seating", "policies")
    agents: dict[Any, int] = part_of("_seating", "agents")
    """Agent id -> its index among the agents of each env."""
    agent_spaces: dict[Any, Spaces] = part_of("_seating", "agent_spaces")
    agent_gym_spaces: dict[Any, tuple[Any, Any]] = part_of("_seating", "agent_gym_spaces")

    # -- one step -----------------------------------------------------------------------------------------------------

    def acting(self) -> ActingSeats:
        """Return the seats that act in the next `step`."""
        if self._acting is None:
            live = self._envs.live
            self._acting = acting_seats(self.lanes if live is None else [self.lanes[index] for index in live.tolist()])
        return self._acting

    def step(self, acting: ActingSeats, actions: Sequence[Any]) -> StepOutcome:
        """Step every live lane with the actions of its seats, in the order of `acting.seats`. Return the outcome.

        Raises `PolicyMappingError` for a newcomer that cannot be mapped, and `ConnectorError` for a newcomer that a
        connector has no room for. After either error nothing of the step counts.
        """
        self._sent = acting.by_lane(actions)
        self._source.send(self._sent)
        gathered = Gathered(self._sent)
        outcome = self._conclude(acting, self._source.poll(), gathered)
        if gathered.reports or gathered.failures:
            self._acting = None
        else:
            acting.env_t += 1
        return outcome

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
        acting = acting_seats([self.lanes[index] for index in outcome.lanes.tolist()])
        for _, episode in acting.lanes:
            episode.under_way = False
        return acting, self._conclude(acting, outcome, Gathered(self._sent))

    def _conclude(self, acting: ActingSeats, stepped: Outcome, gathered: Gathered) -> StepOutcome:
        """Return the outcome of the replies of the lanes of `acting`, and apply it to the seats."""
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
        bad |= self._seating.show(gathered.seats, gathered.observations)
        gathered.failures += [Failure(lane, error, stepped=True) for lane, error in bad.items()]
        outcome = StepOutcome(gathered.seats[:plain], rewards[:plain], gathered.failures)
        if bad:
            good = [i for i, seat in enumerate(outcome.answered) if seat.episode.env_index not in bad]
            outcome.answered, outcome.rewards = [outcome.answered[i] for i in good], outcome.rewards[good]
        apply_reports(outcome, zip(gathered.reports, newcomers, strict=True), rewards[plain:].tolist(), bad)
        return outcome

    def _gather(self, answers: Iterable[LaneAnswer], gathered: Gathered) -> None:
        config = self._table.config
        seats, observations, rewards = gathered.seats, gathered.observations, gathered.rewards
        for lane, episode, answer in answers:
            episode.t += 1
            if episode.is_plain and is_plain(answer, episode.agents):
                seats += episode.acting
                observations += answer[0].values()
                rewards += answer[1].values()
                continue
            try:
                check_idle(episode, config.max_idle_env_steps)
                report = read_step(episode, answer, self.agents, config.missing_final_observation)
            except Exception as error:  # noqa: BLE001 - the methods of a user's objects may raise
                gathered.failures.append(Failure(lane.index, take_apart(answer, error), stepped=True))
                continue
            gathered.reports.append(report)

    def _seat_newcomers(self, reports: Sequence[LaneReport]) -> list[list[Seat]]:
        seat = self._seating.seat
        return [[seat(report.episode, agent) for agent, _ in report.newcomers] for report in reports]

    # -- the envs -----------------------------------------------------------------------------------------------------

    pace: Pace = part_of("_envs", "pace")
    halves: list[NDArray[np.intp]] = part_of("_envs", "halves")
    live: NDArray[np.intp] | None = part_of("_envs", "live")
    under_way: set[int] = part_of("_envs", "under_way")
    repairing: bool = part_of("_envs", "repairing")
    replies_at_once: bool = part_of("_envs", "replies_at_once")
    env_hosts: EnvHostsHere | None = part_of("_envs", "env_hosts")
    seeds_every_episode: bool = part_of("_envs", "seeds_every_episode")
    steps_to_reset: bool = part_of("_envs", "steps_to_reset")
    on_rebuild: Callable[[], None] | None = part_of("_envs", "on_rebuild")
    on_episode_created: Callable[[Lane, Episode], None] | None = part_of("_envs", "on_episode_created")
    on_failure: Callable[[Lane, Failure], None] | None = part_of("_envs", "on_failure")
    on_wait: Callable[[], None] | None = part_of("_envs", "on_wait")
    fail: Callable[[Failure], None] = part_of("_envs", "fail")
    try_render_at: Callable[[int], NDArray[np.uint8] | None] = part_of("_envs", "try_render_at")

    def build(self, config: EnvRunnerConfig) -> None:
        """Build all envs, after closing earlier ones. Raises if an env cannot be built."""
        self._acting = None
        self._envs.build(config)

    def try_reset(self, lanes: Sequence[int]) -> None:
        """Begin an episode in each of `lanes`, now or with a later poll. Raises as `Seating.seat` does."""
        self._acting = None
        self._envs.try_reset(lanes)

    def take_started(self) -> list[int]:
        """Return the lanes that began an episode since the last call; their agents have seats.

        Raises as `Seating.seat` does.
        """
        self._acting = None
        return self._source.take_started()

    def end_episodes(self, lanes: Sequence[int]) -> None:
        """Forget the episodes of `lanes`: they are over, or abandoned."""
        self._acting = None
        self._envs.end_episodes(lanes)

    def try_restart(self) -> None:
        """Close and rebuild the failed envs, now or after their wait. Raises as `LaneDriver.try_restart` does."""
        self._acting = None
        self._envs.try_restart()

    def wait_for_one(self, start_episodes: StartEpisodes, on_wait: Callable[[], None] | None) -> None:
        """Rebuild the failed envs whose wait is over. Sleep while no env is up."""
        self._acting = None
        self._envs.wait_for_one(start_episodes, on_wait)

    def stop(self) -> None:
        """Close all envs, within one time limit for all of them."""
        self._acting = None
        self._envs.stop()


def _undo(acting: ActingSeats, gathered: Gathered) -> None:
    """Undo the poll's counts: no action is pending because of it, and no episode is longer."""
    raised = {failure.lane for failure in gathered.failures if not failure.stepped}
    for lane, episode in acting.lanes:
        episode.t -= lane.index not in raised
        for seat in episode.acting:
            seat.pending = False
