"""Multi-agent envs in this process: stepped one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from headrace.schemas.errors import ConnectorError, EnvContractError
from headrace.workers.agents.answers import read_reset
from headrace.workers.agents.env import AgentDict, build_multi_agent_env, gym_spaces_of, spaces_by_agent
from headrace.workers.agents.episodes import MultiAgentEpisode, Seat
from headrace.workers.agents.lanes import MultiAgentLanes
from headrace.workers.agents.turns import Turn
from headrace.workers.envs.context import EnvContext
from headrace.workers.envs.creators import EnvCreator
from headrace.workers.envs.failures import Failure
from headrace.workers.envs.lane import Lane
from headrace.workers.envs.lanes import LaneVector
from headrace.workers.policy.policies import PolicyMappingError


class MultiAgentVector(MultiAgentLanes, LaneVector):
    """Lanes with a multi-agent env each, which is an object of this process."""

    def _build_env(self, creator: EnvCreator, context: EnvContext) -> Any:
        return build_multi_agent_env(creator, context)

    def _learn_spaces(self, first: Any) -> None:
        gym_spaces = gym_spaces_of(first)
        check_bounds = not self._config.disable_env_checking
        self._learn_agents(spaces_by_agent(gym_spaces), gym_spaces, check_bounds=check_bounds)

    def _check_spaces(self, lane: Lane) -> None:
        env: Any = lane.env
        spaces = spaces_by_agent(gym_spaces_of(env))
        if spaces != self.agent_spaces:
            different = [a for a in {**self.agent_spaces, **spaces} if spaces.get(a) != self.agent_spaces.get(a)]
            seen = {agent: spaces.get(agent) for agent in different[:2]}
            wanted = {agent: self.agent_spaces.get(agent) for agent in different[:2]}
            raise EnvContractError(f"spaces of env {lane.index}", f"{seen!r:.300}", f"those of env 0, {wanted!r:.300}")

    def _answers(
        self, turn: Turn, actions: Sequence[Any], sent: dict[int, AgentDict], failures: list[Failure]
    ) -> Iterator[tuple[Lane, MultiAgentEpisode, Any]]:
        start = 0
        for lane, episode in turn.lanes:  # as `Turn.of_lanes`, which would cost a hundredth of the speed
            stop = start + len(episode.agents)
            sent[lane.index] = own = dict(zip(episode.agents, actions[start:stop], strict=True))
            start = stop
            try:
                answer = lane.step(own)  # type: ignore[misc]
            except Exception as error:  # noqa: BLE001 - a user's env
                failures.append(Failure(lane.index, error))
                continue
            yield lane, episode, answer

    def try_reset(self, lanes: Sequence[int]) -> None:
        """See `LaneVector`. Raises `PolicyMappingError`."""
        begun: list[tuple[Lane, MultiAgentEpisode]] = []
        seats: list[Seat] = []
        observations: list[Any] = []
        for index in lanes:
            lane = self.lanes[index]
            if lane.env is None:
                continue
            episode = lane.create_episode(lane.seeds.next(), MultiAgentEpisode)
            try:
                if self.on_episode_created is not None:
                    self.on_episode_created(lane, episode)
                first, episode.reset_info = read_reset(lane.env.reset(seed=episode.seed), self.agents)
            except Exception as error:  # noqa: BLE001 - a user's env
                self._failed.append(Failure(index, error, unbegun=episode))
                continue
            begun.append((lane, episode))
            self._seat_newest(begun, first)
            seats += episode.acting
            observations += first.values()
        bad = self._take_in(seats, observations)
        for lane, episode in begun:
            if lane.index in bad:
                self._failed.append(Failure(lane.index, bad[lane.index], unbegun=episode))
                continue
            episode.seats = {seat.agent: seat for seat in episode.acting}
            lane.episode = episode
            self._started.append(lane.index)
        self._refresh()

    def _seat_newest(self, begun: Sequence[tuple[Lane, MultiAgentEpisode]], agents: Iterable[Any]) -> None:
        """Seat those who were observed by the newest reset. After an error all that was begun is there to abandon."""
        _, newest = begun[-1]
        try:
            newest.let_act([self._seat(newest, agent) for agent in agents])
        except (PolicyMappingError, ConnectorError):
            for lane, episode in begun:
                lane.episode = episode
            raise
