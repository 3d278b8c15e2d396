"""Views of an episode of several agents for callbacks: the whole episode, and each agent's part of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from headrace.workers.agents.episodes import MultiAgentEpisode, Seat
from headrace.workers.agents.seat_fragment import SeatFragment
from headrace.workers.sampling.episode_view import AnyEpisodeView, EpisodeView


@dataclass(frozen=True, slots=True)
class AgentView(EpisodeView):
    """One agent's part of an episode. It has the agent's answered steps, and the agent's own `end` once it is done.

    `action` is the agent's newest action, answered or not. `reward` is the reward of its newest step. If the agent was
    done before the last cut, the view has only its length and return.
    """

    seat: Seat = field(kw_only=True)

    @property
    def agent_id(self) -> str:
        """The agent's id, as on its chunks."""
        return self.seat.episode.agent

    @property
    def module_id(self) -> str:
        """The module that plays the agent in this episode."""
        return self.seat.module.module_id

    @property
    def episode_return(self) -> float:
        """Sum of the agent's rewards, with those before its first observation and those of a pending step."""
        return self.episode.episode_return + float(self.rewards.sum()) + self.seat.reward


@dataclass(frozen=True, slots=True)
class MultiAgentEpisodeView(AnyEpisodeView):
    """One episode of several agents as it stands now; do not keep it beyond the callback that got it.

    Agents have the ids that the env gives them. Before the reset there are no agents.
    """

    episode: MultiAgentEpisode
    fragments: Mapping[str, SeatFragment] = field(default_factory=dict)
    """Fragments with the agents' open rows, by module id."""
    taken: dict[Any, AgentView] | None = None
    """Views of all agents, made before the buffers drop the episode; None while the buffers have it."""

    def lasting(self) -> MultiAgentEpisodeView:
        """Return a view that stays readable after the episode's rows are dropped, until other rows overwrite them."""
        return replace(self, taken=self.agents)

    def __len__(self) -> int:
        """Env steps since the reset."""
        return self.episode.t

    @property
    def episode_return(self) -> float:
        """Sum of all rewards of all agents since the reset."""
        return sum(view.episode_return for view in self.agents.values())

    @property
    def agent_ids(self) -> list[Any]:
        """Agents that have appeared, in that order."""
        return list(self.episode.seats)

    @property
    def agents_to_act(self) -> list[Any]:
        """Agents with an observation to act upon, in the order in which the env gave them."""
        return list(self.episode.agents)

    @property
    def agents_done(self) -> list[Any]:
        """Agents that have terminated or were truncated."""
        return [agent for agent, seat in self.episode.seats.items() if seat.done]

    @property
    def agents(self) -> dict[Any, AgentView]:
        """A view of each agent that has appeared."""
        return {agent: self._view(seat) for agent, seat in self.episode.seats.items()}

    def agent(self, agent_id: Any) -> AgentView:
        """Return the view of one agent. Raises `KeyError` for one that has not appeared."""
        seat = self.episode.seats.get(agent_id)
        if seat is None:
            raise KeyError(f"agent {agent_id!r} has not appeared in this episode; those that have: {self.agent_ids!r}")
        return self._view(seat)

    def _view(self, seat: Seat) -> AgentView:
        if self.taken is not None:
            return self.taken[seat.agent]
        fragment = self.fragments.get(seat.module.module_id)
        rows = fragment.rows_of(seat.row, seat.episode, pending=seat.pending) if fragment is not None else None
        return AgentView(
            seat.episode, self.id_high, seat.module.policy.spaces, rows, end=seat.end, made_at=self.made_at, seat=seat
        )
