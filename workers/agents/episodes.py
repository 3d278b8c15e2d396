"""One episode of a multi-agent env, and the seats of the agents that appeared in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.workers.envs.lane import Episode

if TYPE_CHECKING:
    from headrace.workers.agents.module_seats import ModuleSeats


@dataclass(slots=True, eq=False)
class AgentEpisode(Episode):
    """One agent's part of an episode. Its steps and return are the agent's own."""

    agent: str = ""
    """The agent's id, as it is on chunks."""
    whole: MultiAgentEpisode | None = None
    t_end: int = 0
    """The env step after the last one that was delivered."""
    observed_more: int = 0
    """Number of observations less number of actions, among the steps that are not delivered yet."""


@dataclass(slots=True, eq=False)
class Seat:
    """One agent in one episode of one env. `row` is its row in the columns of the module that plays it."""

    agent: Any
    module: ModuleSeats
    row: int
    episode: AgentEpisode
    reward: float = 0.0
    """The sum of its rewards since its last action, or before its first."""
    pending: bool = False
    """True while neither an observation nor the agent's end has answered its action."""
    end: ChunkEnd = ChunkEnd.ONGOING

    @property
    def is_awaited(self) -> bool:
        """Return whether the newest action has no answer: it is pending, or the env has not answered the step yet."""
        whole = self.episode.whole
        return self.pending or (whole is not None and whole.under_way and self in whole.acting)

    @property
    def done(self) -> bool:
        """Return whether the agent has terminated or was truncated, so it is not observed again in the episode."""
        return self.end is not ChunkEnd.ONGOING


@dataclass(slots=True, eq=False)
class MultiAgentEpisode(Episode):
    """The state that all agents of an episode share: the env's clock, and which agents act next."""

    seats: dict[Any, Seat] = field(default_factory=dict)
    early_rewards: dict[Any, float] = field(default_factory=dict)
    """Rewards of agents that have not appeared yet."""
    t: int = 0
    t_cut: int = 0
    """Env steps that were delivered."""
    acting: list[Seat] = field(default_factory=list)
    """Seats with an observation to act on, in the order in which the env gave them."""
    agents: list[Any] = field(default_factory=list)
    """The agent ids of `acting`."""
    turn: int = 0
    """Number of times that other seats were set to act."""
    under_way: bool = False
    """True while the agents have acted and the env has not answered. An abandoned step does not count."""
    is_plain: bool = False
    """True if an answer with observations and rewards of exactly these agents needs no bookkeeping."""
    idle_steps: int = 0
    """Env steps in a row after which no agent could act."""

    def let_act(self, seats: list[Seat]) -> None:
        """Set `seats`, which have an observation, to act next. All other seats wait or are done."""
        self.acting = seats
        self.turn += 1
        self.agents = [seat.agent for seat in seats]
        self.idle_steps = 0 if seats else self.idle_steps + 1
        self.is_plain = bool(seats) and not any(seat.reward for seat in seats)
