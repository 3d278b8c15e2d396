"""Reading a multi-agent env's answer: which agents were observed, whose action is answered, and which are done.

An agent that acted is in one of four cases after an env step:

    observed                        its transition is complete; it acts next, unless it is done
    neither observed nor done       its action is pending: it waits, and rewards go on adding up
    done, not observed, terminated  its transition is complete; its last observation is the one it acted on
    done, not observed, truncated   the observation from which a learner bootstraps is missing: the config decides
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from headrace.schemas.basics.printable import brief
from headrace.schemas.basics.stop_event import raise_stop
from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.errors import EnvContractError
from headrace.workers.agents.env import ALL, AgentDict
from headrace.workers.agents.episodes import MultiAgentEpisode, Seat
from headrace.workers.envs.checks import end_of, take_reset_apart

MissingFinal = Literal["error", "repeat", "drop"]
MOST_IDLE_STEPS = 10_000
"""Env steps in a row in which no agent acts. After one more, the env has failed."""
_PARTS = ("observations", "rewards", "terminateds", "truncateds", "infos")


@dataclass(slots=True, eq=False)
class LaneReport:
    """The meaning of one env's reply for its seats. It is not applied yet, and its rewards are not checked."""

    episode: MultiAgentEpisode
    observed: list[Seat] = field(default_factory=list)
    observations: list[Any] = field(default_factory=list)
    newcomers: list[tuple[Any, Any]] = field(default_factory=list)
    """(agent, its first observation)."""
    rewards: list[tuple[Any, Any]] = field(default_factory=list)
    answered: list[Seat] = field(default_factory=list)
    unseen: list[Seat] = field(default_factory=list)
    """Seats of `answered` that are done and got no last observation."""
    ended: list[tuple[Seat, ChunkEnd]] = field(default_factory=list)
    dropped: list[Seat] = field(default_factory=list)
    """Seats whose last action is dropped, because it has no answer."""
    repeated: int = 0
    infos: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)
    end: ChunkEnd = ChunkEnd.ONGOING
    """The end of the episode as a whole."""


def is_plain(answer: Any, agents: list[Any]) -> bool:
    """Return whether exactly `agents` were observed and rewarded, none is done, and there are no infos."""
    try:
        observations, rewards, terminateds, truncateds, infos = answer
        return (
            list(observations) == agents
            and list(rewards) == agents
            and ALL in terminateds
            and not any(terminateds.values())
            and not any(truncateds.values())
            and not any(infos.values())
        )
    except BaseException as error:  # noqa: BLE001 - the methods of a user's objects may raise
        raise_stop(error)
        return False


def read_reset(answer: Any, known: Collection[Any]) -> tuple[AgentDict, AgentDict]:
    """Return (observations, infos) of a reset. Raises `EnvContractError`."""
    observations, infos = take_reset_apart(answer)
    _check_dict("observations of reset", observations)
    check_known(observations, known)
    return observations, with_content(infos)


def take_step_apart(answer: Any) -> tuple[AgentDict, AgentDict, AgentDict, AgentDict, AgentDict]:
    """Return a step's (observations, rewards, terminateds, truncateds, infos), all dicts. Raises `EnvContractError`."""
    if not isinstance(answer, tuple | list) or len(answer) != len(_PARTS):
        raise EnvContractError("answer of step", brief(answer, 120), f"({', '.join(_PARTS)})")
    for name, part in zip(_PARTS, answer, strict=True):
        _check_dict(name, part)
    observations, rewards, terminateds, truncateds, infos = answer
    if ALL not in terminateds:
        raise EnvContractError("terminateds", brief(terminateds, 120), f"a dict with {ALL!r} among its keys")
    return observations, rewards, terminateds, truncateds, infos


def read_step(
    episode: MultiAgentEpisode, answer: Any, known: Collection[Any], missing_final: MissingFinal
) -> LaneReport:
    """Return the meaning of `answer`, the result of a step. Marks all seats that acted as pending.

    Raises `EnvContractError`.
    """
    observations, rewards, terminateds, truncateds, infos = take_step_apart(answer)
    for seat in episode.acting:
        seat.pending = True
    all_end = end_of(terminateds[ALL], truncateds.get(ALL, False))
    report = LaneReport(episode, end=all_end)
    ends = {agent: _own_end(agent, terminateds, truncateds, all_end) for agent in {*episode.seats, *observations}}
    _read_observations(report, observations, ends, known)
    _read_rewards(report, rewards, known)
    for seat in episode.seats.values():
        if not seat.done:
            _read_seat(report, seat, ends[seat.agent], seat.agent in observations, missing_final)
    report.infos = list(with_content(infos).items())
    return report


def check_idle(episode: MultiAgentEpisode) -> None:
    """Raise `EnvContractError` if no agent has acted for too many steps: such an episode might never end."""
    if episode.idle_steps > MOST_IDLE_STEPS:
        raise EnvContractError(
            "env steps in a row in which no agent acts",
            str(episode.idle_steps),
            f"at most {MOST_IDLE_STEPS:,}, after which an agent is observed or the episode ends ({ALL!r})",
        )


def _own_end(agent: Any, terminateds: Mapping[Any, Any], truncateds: Mapping[Any, Any], all_end: ChunkEnd) -> ChunkEnd:
    terminated, truncated = terminateds.get(agent, False), truncateds.get(agent, False)
    if terminated is False and truncated is False:
        return all_end
    own = end_of(terminated, truncated)
    return all_end if own is ChunkEnd.ONGOING else own


def _read_observations(
    report: LaneReport, observations: AgentDict, ends: Mapping[Any, ChunkEnd], known: Collection[Any]
) -> None:
    for agent, observation in observations.items():
        seat = report.episode.seats.get(agent)
        if seat is None:
            check_known([agent], known)
            if ends[agent] is ChunkEnd.ONGOING:  # otherwise it is done before its first action
                report.newcomers.append((agent, observation))
        elif seat.done:
            raise EnvContractError("observations", f"one of agent {agent!r}, which is done", "of live agents only")
        else:
            report.observed.append(seat)
            report.observations.append(observation)


def _read_rewards(report: LaneReport, rewards: AgentDict, known: Collection[Any]) -> None:
    for agent, reward in rewards.items():
        seat = report.episode.seats.get(agent)
        if seat is None:
            check_known([agent], known)
        if seat is None or not seat.done:
            report.rewards.append((agent, reward))
        elif not _is_zero(reward):  # some envs always fill their dicts with zeros
            raise EnvContractError(
                "rewards", f"{brief(reward, 40)} of agent {agent!r}, which is done", "of live agents only"
            )


def _read_seat(report: LaneReport, seat: Seat, end: ChunkEnd, observed: bool, missing_final: MissingFinal) -> None:
    if end is not ChunkEnd.ONGOING:
        report.ended.append((seat, end))
    if not seat.pending:
        return
    if observed:
        report.answered.append(seat)
    elif end is ChunkEnd.TERMINATED or (end is ChunkEnd.TRUNCATED and missing_final == "repeat"):
        report.repeated += end is ChunkEnd.TRUNCATED
        report.answered.append(seat)
        report.unseen.append(seat)
    elif end is ChunkEnd.TRUNCATED and missing_final == "drop":
        report.dropped.append(seat)
    elif end is ChunkEnd.TRUNCATED:
        raise EnvContractError(
            "observations",
            f"none of agent {seat.agent!r}, which is truncated",
            "its final one too, from which a learner bootstraps (missing_final_observation = 'repeat' or 'drop' "
            "lets such agents pass)",
        )


def _check_dict(name: str, part: Any) -> None:
    if not isinstance(part, dict):
        raise EnvContractError(name, f"{brief(part)} ({type(part)})", "a dict by agent id")


def check_known(agents: Iterable[Any], known: Collection[Any]) -> None:
    """Raise `EnvContractError` for an agent that is not among `known`."""
    for agent in agents:
        if agent not in known:
            raise EnvContractError("agent", repr(agent), f"one of possible_agents, {list(known)!r:.200}")


def with_content(infos: AgentDict) -> AgentDict:
    """Return the infos that are not empty. Raises `EnvContractError` for an info that is not a dict."""
    for agent, info in infos.items():
        if not isinstance(info, dict):
            raise EnvContractError("info", f"{brief(info)} ({type(info)}) of agent {agent!r}", "a dict")
    return {agent: info for agent, info in infos.items() if info}


def _is_zero(reward: Any) -> bool:
    return isinstance(reward, bool | int | float | np.generic) and bool(reward == 0)
