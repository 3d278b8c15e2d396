"""The interface through which the multi-agent vector uses its envs, in every placement and pace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from headrace.workers.agents.acting_seats import ActingSeats
from headrace.workers.agents.env import AgentDict
from headrace.workers.agents.episodes import MultiAgentEpisode, Seat
from headrace.workers.agents.lane_report import LaneReport
from headrace.workers.envs.driver import LaneDriver
from headrace.workers.envs.failures import Failure
from headrace.workers.envs.lane import Lane
from headrace.workers.envs.sequential_step import Outcome

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
