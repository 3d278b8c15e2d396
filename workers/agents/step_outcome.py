"""The outcome of a step of all live lanes for their seats, and its application to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.workers.agents.episodes import MultiAgentEpisode, Seat
from headrace.workers.agents.lane_report import LaneReport
from headrace.workers.envs.failures import Failure


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
