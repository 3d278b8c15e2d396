"""External episodes of several agents as the envs of a sampler: whoever is observed acts, by its policy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from headrace.schemas.errors import ConfigError, EnvContractError
from headrace.workers.agents.env import AgentDict, gym_spaces_of, spaces_by_agent
from headrace.workers.agents.episodes import MultiAgentEpisode, Seat
from headrace.workers.agents.lanes import Gathered
from headrace.workers.agents.ready_seats import ReadySeats
from headrace.workers.agents.turns import Turn
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.context import EnvContext
from headrace.workers.envs.lane import Lane
from headrace.workers.envs.stepping import Outcome
from headrace.workers.external.agent_episodes import AgentsCall, ExternalAgentEpisodes
from headrace.workers.external.agents_env import ExternalMultiAgentEnv
from headrace.workers.external.calls import Answer, Call, Row
from headrace.workers.external.lanes import ExternalLanes, keep


class ExternalAgents(ExternalLanes, ReadySeats):
    """`ReadySeats` of episodes that drive themselves: whoever asked has the answer when `send` returns."""

    episodes: ExternalAgentEpisodes
    _episode_kind = MultiAgentEpisode

    def build(self, config: EnvRunnerConfig, first: tuple[Any, EnvContext] | None = None) -> None:
        """See `Roster`."""
        self._heard: dict[int, AgentsCall] = {}
        """By lane, what is not yet taken in of it."""
        super().build(config, first)

    def _checked(self, env: Any) -> ExternalMultiAgentEnv:
        if not isinstance(env, ExternalMultiAgentEnv):
            seen = f"{type(env).__module__}.{type(env).__qualname__}"
            raise EnvContractError("environment", seen, "an ExternalMultiAgentEnv")
        if not hasattr(env, "possible_agents"):
            raise ConfigError(
                f"{type(env).__name__} must call super().__init__(action_space, observation_space)", key="env"
            )
        return env

    def _learn_spaces(self, env: Any) -> None:
        gym_spaces = gym_spaces_of(env)
        check_bounds = not self._config.disable_env_checking
        self._learn_agents(spaces_by_agent(gym_spaces), gym_spaces, check_bounds=check_bounds)
        self._make_rows()

    def _check_spaces(self, env: Any) -> None:
        spaces = spaces_by_agent(gym_spaces_of(env))
        if spaces != self.agent_spaces:
            seen, wanted = f"{spaces!r:.300}", f"those it had before, {self.agent_spaces!r:.300}"
            raise EnvContractError("spaces of the env", seen, wanted)

    def _new_table(self) -> ExternalAgentEpisodes:
        return ExternalAgentEpisodes(
            self.agent_spaces,
            len(self.lanes),
            check_bounds=not self._config.disable_env_checking,
            takes_logged=not any(policy.module_to_env for policy in self.policies.specs.values()),
            needs_final=self._config.missing_final_observation == "error",
        )

    # -- acting -------------------------------------------------------------------------------------------------------

    def logged(self, seats: Iterable[Seat]) -> dict[int, Row]:
        """Of those `seats` that are to act and have acted already, by row: what they did."""
        done = {}
        for seat in seats:
            call = self._places[seat.episode.env_index].call
            if isinstance(call, AgentsCall) and call.logged is not None:
                done[seat.row] = call.logged[seat.agent]
        return done

    def _send(self, actions: Mapping[int, AgentDict]) -> None:
        version = self.read_version()
        self._under_way.update(actions)
        self.episodes.answer((self._places[index], Answer(keep(own), version)) for index, own in actions.items())
        self.episodes.deliver()

    # -- taking in ----------------------------------------------------------------------------------------------------

    def _told(self, turn: Turn, outcome: Outcome, gathered: Gathered) -> Iterator[tuple[Lane, MultiAgentEpisode, Any]]:
        gathered.failures += outcome.failures
        lost = {failure.lane for failure in outcome.failures}
        for lane, episode in turn.lanes:
            if lane.index not in lost:
                yield lane, episode, self._heard.pop(lane.index).answer

    def _see_first(self, call: Call) -> None:
        self._keep(call)

    def _hear(self, call: Call, outcome: Outcome) -> float:
        self._keep(call)
        return 0.0  # rewards are the agents' own

    def _keep(self, call: Call) -> None:
        assert isinstance(call, AgentsCall), "its table makes no other"
        self._heard[call.place.lane] = call

    # -- episodes -----------------------------------------------------------------------------------------------------

    def take_started(self) -> list[int]:
        """See `Roster`. Who is seen first is seated now. Raises as `_seat_first` does."""
        started = sorted(set(super().take_started()))
        begun = ((index, self.lanes[index].episode) for index in started)
        self._seat_first(
            (episode, self._heard.pop(index).seen) for index, episode in begun if isinstance(episode, MultiAgentEpisode)
        )
        return started

    def end_episodes(self, lanes: Sequence[int]) -> None:
        """See `Roster`."""
        for index in lanes:
            self._heard.pop(index, None)
        super().end_episodes(lanes)
