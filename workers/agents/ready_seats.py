"""Multi-agent envs that answer each in its own time, whoever drives them: what their one sampler asks of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from headrace.workers.agents.env import AgentDict
from headrace.workers.agents.episodes import MultiAgentEpisode
from headrace.workers.agents.lanes import AgentSeats, Gathered
from headrace.workers.agents.outcomes import StepOutcome
from headrace.workers.agents.turns import Turn, turn_of
from headrace.workers.envs.lane import Lane
from headrace.workers.envs.stepping import Outcome
from headrace.workers.sampling.acting_lanes import Rows


class ReadySeats(AgentSeats):
    """`send` has some lanes go on, `take` gives what came of any: see `ReadyDriver`, which this is in rows."""

    halves: list[Rows]
    """See `ReadyDriver`."""

    # -- what the kinds of such envs do each in their own way ---------------------------------------------------------

    @property
    @abstractmethod
    def under_way(self) -> set[int]:
        """See `ReadyDriver`."""

    @abstractmethod
    def poll(self) -> Outcome:
        """See `ReadyDriver`."""

    @abstractmethod
    def _send(self, actions: Mapping[int, AgentDict]) -> None:
        """Have lanes go on, by index, with what their agents do. Returns at once."""

    @abstractmethod
    def _told(self, turn: Turn, outcome: Outcome, gathered: Gathered) -> Iterator[tuple[Lane, MultiAgentEpisode, Any]]:
        """What the lanes of `turn` answered, of whom `poll` gave `outcome`; its failures go to `gathered` first."""

    # -- what all of them do alike ------------------------------------------------------------------------------------

    def send(self, turn: Turn, actions: Sequence[Any]) -> None:
        """Have the lanes of `turn`, live and not under way, go on by `actions`, those of its seats. Returns at once."""
        by_lane = {}
        for lane, episode, own in turn.of_lanes(actions):
            episode.under_way = True
            by_lane[lane.index] = own
        self._send(by_lane)

    def take(self) -> tuple[Turn, StepOutcome]:
        """Who has answered, and what came of it; waits as `poll` does. Raises as `_conclude` does."""
        outcome = self.poll()
        assert outcome.lanes is not None, "a ReadyDriver says who has answered"
        turn = turn_of([self.lanes[index] for index in outcome.lanes.tolist()])
        for _, episode in turn.lanes:
            episode.under_way = False
        gathered = Gathered()
        return turn, self._conclude(turn, self._gather(self._told(turn, outcome, gathered), gathered))
