"""External episodes of several agents: the policies act for the observed agents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from headrace.schemas.errors import EnvContractError
from headrace.workers.agents.acting_seats import ActingSeats
from headrace.workers.agents.env import AgentDict, gym_spaces_of, spaces_by_agent
from headrace.workers.agents.episodes import MultiAgentEpisode, Seat
from headrace.workers.agents.seating import Seating
from headrace.workers.agents.vector import Gathered, LaneAnswer
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.lane_table import LaneTable
from headrace.workers.envs.sequential_step import Outcome
from headrace.workers.external.agent_episodes import AgentsCall, ExternalAgentEpisodes
from headrace.workers.external.calls import Answer, Call, Row
from headrace.workers.external.env import ExternalMultiAgentEnv
from headrace.workers.external.lanes import ExternalLanes, keep


class ExternalAgentLanes(ExternalLanes):
    """An `AgentSource` whose episodes drive themselves, the lanes of its env, and an `ExternalDriver`."""

    episodes: ExternalAgentEpisodes
    _env_kind, _made = ExternalMultiAgentEnv, "possible_agents"
    _episode_kind = MultiAgentEpisode

    def __init__(self, table: LaneTable, seating: Seating, first: Any = None) -> None:
        self._seating = seating
        super().__init__(table, first)

    @property
    def envs(self) -> ExternalAgentLanes:
        """The lanes of the env."""
        return self

    def build(self, config: EnvRunnerConfig, first: Any = None) -> None:
        """Build the env, after closing any earlier one. Raises if it cannot be built."""
        self._heard: dict[int, AgentsCall] = {}
        """Calls that are not yet taken in, by lane."""
        super().build(config, first)

    def _learn_spaces(self, env: Any) -> None:
        gym_spaces = gym_spaces_of(env)
        # The table of episodes has checked the rows.
        self._seating.learn(spaces_by_agent(gym_spaces), gym_spaces, check_bounds=False, makes_rows=True)

    def _check_spaces(self, env: Any) -> None:
        spaces, known = spaces_by_agent(gym_spaces_of(env)), self._seating.agent_spaces
        if spaces != known:
            seen, wanted = f"{spaces!r:.300}", f"those it had before, {known!r:.300}"
            raise EnvContractError("spaces of the env", seen, wanted)

    def _new_table(self) -> ExternalAgentEpisodes:
        config = self._table.config
        return ExternalAgentEpisodes(
            self._seating.agent_spaces,
            len(self.lanes),
            self._table.tell,
            note_outside=self._table.note_outside,
            takes_logged=not any(policy.module_to_env for policy in self._seating.policies.specs.values()),
            needs_final=config.missing_final_observation == "error",
        )

    # -- acting -------------------------------------------------------------------------------------------------------

    def logged(self, seats: Iterable[Seat]) -> dict[int, Row]:
        """Return the logged actions by row, of those `seats` whose driver logged one."""
        done = {}
        for seat in seats:
            call = self._places[seat.episode.env_index].call
            if isinstance(call, AgentsCall) and call.logged is not None:
                done[seat.row] = call.logged[seat.agent]
        return done

    def send(self, actions: Mapping[int, AgentDict]) -> None:
        """Send the drivers of lanes, by index, the actions of their agents. The answers are sent when this returns."""
        version = self.read_version()
        self._under_way.update(actions)
        self.episodes.answer((self._places[index], Answer(keep(own), version)) for index, own in actions.items())
        self.episodes.deliver()

    # -- taking in ----------------------------------------------------------------------------------------------------

    def answers(self, acting: ActingSeats, outcome: Outcome, gathered: Gathered) -> Iterator[LaneAnswer]:
        """Yield the report of each lane's driver. Add failures to `gathered` first."""
        gathered.failures += outcome.failures
        lost = {failure.lane for failure in outcome.failures}
        for lane, episode in acting.lanes:
            if lane.index not in lost:
                yield lane, episode, self._heard.pop(lane.index).answer

    def _see_first(self, call: Call) -> None:
        assert isinstance(call, AgentsCall), "its table makes no other"
        self._heard[call.place.lane] = call

    def _hear(self, call: Call, outcome: Outcome) -> float:
        self._see_first(call)
        return 0.0  # rewards are the agents' own

    # -- episodes -----------------------------------------------------------------------------------------------------

    def take_started(self) -> list[int]:
        """Return the lanes that began an episode since the last call, by index. Gives their agents seats.

        Raises as `Seating.seat` does.
        """
        started = sorted(set(super().take_started()))
        begun = ((index, self.lanes[index].episode) for index in started)
        self._seating.seat_first(
            (episode, self._heard.pop(index).seen) for index, episode in begun if isinstance(episode, MultiAgentEpisode)
        )
        return started

    def end_episodes(self, lanes: Sequence[int]) -> None:
        """Drop the episodes of `lanes`. The driver of an abandoned episode gets an error."""
        for index in lanes:
            self._heard.pop(index, None)
        super().end_episodes(lanes)
