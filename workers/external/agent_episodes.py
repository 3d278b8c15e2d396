"""The table of open episodes of several agents.

A call has the agents' observations; each of these agents that is not done acts. Between two calls, the table collects
rewards, infos and ends by agent. It checks each of them on arrival, so that the driver gets the error.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.chunks.spaces import Spaces, nest
from headrace.schemas.errors import EnvContractError, HeadraceError
from headrace.schemas.errors.episodes import EpisodeError
from headrace.workers.agents.env import ALL
from headrace.workers.envs.observations import NoteOutside
from headrace.workers.external.calls import Call, EpisodePlace, OnAnswer, Row, RowReader, add_reward
from headrace.workers.external.episodes import EpisodeTable, Tell


@dataclass(slots=True, eq=False, kw_only=True)
class AgentsCall(Call):
    """Dicts by agent: observations, rewards, ends, and the actions that were already taken, if they are logged."""

    seen: dict[Any, Any]
    rewards: dict[Any, float]
    """Rewards of the observed agents, in their order, then of other agents."""
    done: dict[Any, ChunkEnd]
    logged: Mapping[Any, Row] | None = None

    @property
    def answer(self) -> tuple[dict[Any, Any], ...]:
        """The call as a step of a multi-agent env would return it."""
        ends = {**self.done, ALL: self.end}
        terminateds = {agent: end is ChunkEnd.TERMINATED for agent, end in ends.items()}
        truncateds = {agent: end is ChunkEnd.TRUNCATED for agent, end in ends.items()}
        return self.seen, self.rewards, terminateds, truncateds, self.info


@dataclass(slots=True, eq=False)
class AgentsPlace(EpisodePlace):
    """The place of one episode, with the rewards, infos and ends logged since the last call."""

    playing: set[Any] = field(default_factory=set)
    """Agents that have acted and are not done."""
    gone: set[Any] = field(default_factory=set)
    """Agents that will not be observed any more."""
    rewards: dict[Any, float] = field(default_factory=dict)
    infos: dict[Any, dict[str, Any]] = field(default_factory=dict)
    done: dict[Any, ChunkEnd] = field(default_factory=dict)
    """Agents that have ended, and how. An agent may have a last observation with the next call, not later."""

    def forget(self) -> None:
        """Drop the rewards, infos and ends logged since the last call."""
        self.rewards, self.infos, self.done = {}, {}, {}


class ExternalAgentEpisodes(EpisodeTable[AgentsPlace]):
    """The episodes of agents with these `spaces`. `needs_final`: a truncated agent must be observed once more."""

    def __init__(
        self,
        spaces: Mapping[Any, Spaces],
        capacity: int,
        tell: Tell,
        *,
        note_outside: NoteOutside | None = None,
        takes_logged: bool = True,
        needs_final: bool = True,
    ) -> None:
        super().__init__(capacity, tell, takes_logged=takes_logged, note_outside=note_outside)
        self.spaces = dict(spaces)
        self._ids = {str(agent): agent for agent in spaces}
        self._needs_final = needs_final
        self._observations = {
            agent: RowReader(own.observation, "obs", f"observation of agent {agent!r}", note_outside)
            for agent, own in spaces.items()
        }
        self._actions = {
            agent: RowReader(own.action, "actions", f"action of agent {agent!r}") for agent, own in spaces.items()
        }

    # -- between two calls --------------------------------------------------------------------------------------------

    def log_returns(
        self,
        episode_id: str,
        rewards: Mapping[Any, float],
        infos: Mapping[Any, dict[str, Any]] | None = None,
        terminateds: Mapping[Any, bool] | None = None,
        truncateds: Mapping[Any, bool] | None = None,
    ) -> None:
        """Add `rewards` to those of this step. `infos` replace those of this step. An agent that is done stays done.

        Raises `EnvContractError` and `EpisodeError`. After an error nothing of the call counts.
        """
        with self._lock:
            self._note(self._find(episode_id), rewards, infos, terminateds, truncateds)

    def _note(self, place: AgentsPlace, rewards: Any, infos: Any, terminateds: Any, truncateds: Any) -> None:
        if not place.has_acted:
            raise EpisodeError(place.episode_id, "no_action")
        self._check_agents("rewards", rewards)
        earned = {agent: _earn(place, agent, reward) for agent, reward in rewards.items()}
        told = self._read_each("info", {} if infos is None else infos, dict)
        told = {agent: self._tell(info) for agent, info in told.items()}
        ends = self._read_ends(terminateds, ChunkEnd.TERMINATED)
        ends = self._read_ends(truncateds, ChunkEnd.TRUNCATED) | ends
        place.rewards |= {agent: total for agent, total in earned.items() if agent not in place.gone}
        place.infos |= told
        place.done = {agent: end for agent, end in ends.items() if agent not in place.gone} | place.done

    def _read_ends(self, dones: Mapping[Any, bool] | None, end: ChunkEnd) -> dict[Any, ChunkEnd]:
        read = self._read_each(end.name.lower(), _without_all({} if dones is None else dones), bool)
        return {agent: end for agent, is_done in read.items() if is_done}

    def _read_each(self, what: str, by_agent: Any, kind: type) -> Mapping[Any, Any]:
        self._check_agents(what, by_agent)
        for agent, value in by_agent.items():
            if not isinstance(value, kind):
                raise EnvContractError(what, f"{value!r:.80} ({type(value)}) of agent {agent!r}", f"a {kind.__name__}")
        checked: Mapping[Any, Any] = by_agent
        return checked

    def _check_agents(self, what: str, by_agent: Any) -> None:
        if not isinstance(by_agent, Mapping):
            raise EnvContractError(what, f"{by_agent!r:.80} ({type(by_agent)})", "a dict by agent id")
        for agent in by_agent:
            if agent not in self.spaces:
                raise EnvContractError("agent", f"{agent!r:.80} in {what}", f"one of {list(self.spaces)!r:.200}")

    # -- one call -----------------------------------------------------------------------------------------------------

    def _new_place(self, lane: int, episode_id: str, training_enabled: bool) -> AgentsPlace:
        return AgentsPlace(lane, episode_id, training_enabled)

    def _take_news(self, place: AgentsPlace, news: tuple[Any, ...], seen: Any, action: Any, end: ChunkEnd) -> None:
        try:
            if news:
                self._note(place, *({self._ids.get(agent, agent): own for agent, own in told.items()} for told in news))
            self._check_seen(place, seen, end)
            if action is not None:
                self._check_logged(place, seen, action)
        except HeadraceError:
            place.forget()
            raise

    def _new_call(
        self, place: AgentsPlace, observation: Any, on_answer: OnAnswer, action: tuple[Any] | None, end: ChunkEnd
    ) -> Call:
        self._check_seen(place, observation, end)
        seen = {agent: self._observations[agent].read(own) for agent, own in observation.items()}
        logged = None
        if action is not None:
            self._check_logged(place, seen, action[0])
            logged = {agent: self._actions[agent].read(own) for agent, own in action[0].items()}
        return self._call(place, seen, on_answer, logged, end)

    def _call(
        self,
        place: AgentsPlace,
        seen: Mapping[Any, Row],
        on_answer: OnAnswer,
        logged: Mapping[Any, Row] | None,
        end: ChunkEnd,
    ) -> AgentsCall:
        call = AgentsCall(
            place=place,
            on_answer=on_answer,
            info={agent: info for agent, info in place.infos.items() if info},
            end=end,
            seen={agent: nest(self.spaces[agent].observation, row, "obs") for agent, row in seen.items()},
            rewards={agent: place.rewards.pop(agent, 0.0) for agent in seen} | place.rewards,
            done=place.done,
            logged=logged,
        )
        place.playing.update(seen)
        place.playing.difference_update(place.done)
        place.gone.update(place.done)
        place.forget()
        return call

    def _check_seen(self, place: AgentsPlace, observations: Any, end: ChunkEnd) -> None:
        self._check_agents("observations", observations)
        for agent in observations:
            if agent in place.gone:
                seen = f"one of agent {agent!r}, which is done"
                raise EnvContractError("observations", seen, "of live agents only")
        if end is ChunkEnd.ONGOING and place.done.keys() >= observations.keys():
            raise EnvContractError(
                "observations",
                f"those of {list(observations)!r:.80}, none of whom is to act",
                "of an agent that is; last ones of agents that are done go with them, or with the end of the episode",
            )
        unseen = place.playing.difference(observations)
        missing = [agent for agent in unseen if place.done.get(agent, end) is ChunkEnd.TRUNCATED]
        if self._needs_final and missing:
            raise EnvContractError(
                "observations",
                f"none of {sorted(map(str, missing))!r:.80}, who are truncated",
                "their final ones too, from which a learner bootstraps (missing_final_observation = 'repeat' or 'drop' "
                "lets such agents pass)",
            )

    def _check_logged(self, place: AgentsPlace, seen: Collection[Any], actions: Any) -> None:
        self._check_agents("actions", actions)
        acting = [agent for agent in seen if agent not in place.done]
        if set(actions) != set(acting):
            told = f"those of {list(actions)!r:.100}"
            raise EnvContractError("actions", told, f"one of each agent that is to act, {acting!r:.100}")


def _earn(place: AgentsPlace, agent: Any, reward: Any) -> float:
    try:
        total = add_reward(place.rewards.get(agent, 0.0), reward)
    except EnvContractError as error:
        raise EnvContractError(f"{error.what} of agent {agent!r}", error.seen, error.expected) from error
    if total and agent in place.gone:  # some envs always fill their dicts with zeros
        raise EnvContractError("rewards", f"{reward!r:.40} of agent {agent!r}, which is done", "of live agents only")
    return total


def _without_all(dones: Any) -> Any:
    """Return `dones` without the key of the whole episode, which must be False: `end_episode` ends the episode."""
    if not isinstance(dones, Mapping) or ALL not in dones:
        return dones
    if dones[ALL] is not False:
        raise EnvContractError("done", f"{ALL!r}: {dones[ALL]!r:.40}", "agents' own; end_episode() ends the episode")
    return {agent: done for agent, done in dones.items() if agent != ALL}
