"""One step of many envs of one agent, one after the other. Their results are checked together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import is_
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.accounts.user_calls import UserCall
from headrace.schemas.basics.stop_event import raise_stop
from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.errors import EnvContractError
from headrace.workers.envs.checks import check_info, check_rewards, end_of, take_apart
from headrace.workers.envs.failures import Failure
from headrace.workers.envs.observations import Observations
from headrace.workers.metrics.call_mark import CallMark

Read = tuple[Sequence[Any], Sequence[Any], list[tuple[int, ChunkEnd]], list[int], list[tuple[int, dict[str, Any]]]]
"""Observations and rewards of some lanes, one each. Ends and infos with their lanes, where there are any. Between them,
the lanes that are terminated and truncated at once.
"""
MANY = 8
"""Number of answers from which they are read together."""
_FALSE = repeat(False)
_UNWATCHED = CallMark()


class Steppable(Protocol):
    """An env, and its row in the columns."""

    index: int
    step: Callable[[Any], Any] | None


@dataclass(slots=True, eq=False)
class Outcome:
    """The outcome of one step of every live lane. `rewards` has one number for each in order, 0 where `step` failed.

    Where each env has its own pace, `lanes` are the lanes that have stepped. They take the place of the live lanes.
    """

    rewards: NDArray[np.float64]
    ended: list[tuple[int, ChunkEnd]]
    failures: list[Failure]
    infos: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    begun: bool = False
    """True if this step began episodes in lanes that were not live. `take_started` returns these lanes."""
    resets: int = 0
    """Number of lanes that did not step, because a self-resetting vector used the step for a reset."""
    lanes: NDArray[np.intp] | None = None
    also_truncated: list[int] = field(default_factory=list)
    """Lanes in `ended` as TERMINATED that are truncated too. Told where lanes step together; chunks have one end."""


def step_all(
    live: Sequence[Steppable],
    actions: Sequence[Any],
    into: Observations,
    width: int,
    tell: Callable[[dict[str, Any]], Any] | None = None,
    calls: CallMark = _UNWATCHED,
) -> Outcome:
    """Step each of `live` with the action at its index. Write the observations into the `width` rows of `into`.

    Marks each step in `calls`. The outcome has what `tell` returns for each info. If it raises `EnvContractError`, the
    env has failed.
    """
    answers: list[Any] = []
    failures: list[Failure] = []
    good: list[int] = []
    words, is_slow = calls.words, calls.is_slow
    words[0] = UserCall.STEP
    if calls.sides is not None:
        calls.sides.enter()
    for lane in live:
        index = words[1] = lane.index
        try:
            answers.append(lane.step(actions[index]))  # type: ignore[misc]
        except BaseException as error:  # noqa: BLE001 - a user's env
            raise_stop(error)
            failures.append(Failure(index, error))
        else:
            good.append(index)
        if is_slow:
            calls.between()
    calls.end_steps()
    read = read_together(good, answers) if len(answers) >= MANY else None
    if read is None:
        good, read = read_each(good, answers, failures)
    observations, rewards, ended, also_truncated, infos = read
    checked, problems = check_rewards(rewards, good, actions)
    problems += into.put(None if len(good) == width else np.array(good, np.intp), observations)
    bad = {good[position]: error for position, error in reversed(problems)} if problems else {}
    if infos and tell is not None:
        infos, untold = tell_each(infos, tell)
        bad |= untold
    if bad:
        failures += [Failure(lane, error, stepped=True) for lane, error in bad.items()]
    outcome = Outcome(checked, ended, failures, infos, also_truncated=also_truncated)
    return _without_failed(outcome, live, good) if failures else outcome


def tell_each(
    infos: Sequence[tuple[int, dict[str, Any]]], tell: Callable[[dict[str, Any]], Any]
) -> tuple[list[tuple[int, Any]], dict[int, EnvContractError]]:
    """Return what `tell` makes of each lane's info, and the errors of the other lanes."""
    told, bad = [], {}
    for lane, info in infos:
        try:
            told.append((lane, tell(info)))
        except EnvContractError as error:
            bad[lane] = error
    return told, bad


def read_together(lanes: Sequence[int], answers: Sequence[Any]) -> Read | None:
    """Return what `read_each` returns, if all answers are tuples with bools and dicts; else return None.

    It makes some calls for all answers, and `read_each` some for each: with `MANY` answers both take the same time.
    """
    if {*map(type, answers)} != {tuple}:
        return None
    try:
        observations, rewards, terminated, truncated, infos = zip(*answers, strict=True)
    except ValueError:
        return None
    if {*map(type, infos)} != {dict}:
        return None
    ended: list[tuple[int, ChunkEnd]] = []
    also_truncated: list[int] = []
    if not (all(map(is_, terminated, _FALSE)) and all(map(is_, truncated, _FALSE))):
        if not {*map(type, terminated), *map(type, truncated)} <= {bool, np.bool_}:
            return None
        ends = [end for end in zip(lanes, terminated, truncated, strict=True) if end[1] or end[2]]
        ended = [(lane, end_of(done, cut)) for lane, done, cut in ends]
        also_truncated = [lane for lane, done, cut in ends if done and cut]
    told = [(lane, info) for lane, info in zip(lanes, infos, strict=True) if info] if any(infos) else []
    return observations, rewards, ended, also_truncated, told


def read_each(lanes: Sequence[int], answers: Sequence[Any], failures: list[Failure]) -> tuple[list[int], Read]:
    """Return the lanes with a sound answer, and these answers' parts. Add the other lanes to `failures`."""
    good: list[int] = []
    observations: list[Any] = []
    rewards: list[Any] = []
    ended: list[tuple[int, ChunkEnd]] = []
    also_truncated: list[int] = []
    infos: list[tuple[int, dict[str, Any]]] = []
    for index, answer in zip(lanes, answers, strict=True):
        try:
            observation, reward, terminated, truncated, info = answer
            if info or info.__class__ is not dict:
                check_info(info)
                if info:
                    infos.append((index, info))
            if terminated is not False or truncated is not False:
                end = end_of(terminated, truncated)
                if end is not ChunkEnd.ONGOING:
                    ended.append((index, end))
                    if terminated and truncated:
                        also_truncated.append(index)
        except BaseException as error:  # noqa: BLE001 - the methods of a user's objects may raise
            raise_stop(error)
            failures.append(Failure(index, take_apart(answer, error), stepped=True))
            continue
        observations.append(observation)
        rewards.append(reward)
        good.append(index)
    return good, (observations, rewards, ended, also_truncated, infos)


def _without_failed(outcome: Outcome, live: Sequence[Steppable], good: list[int]) -> Outcome:
    """Remove all other reports of failed lanes, because these envs cannot be trusted."""
    failed = {failure.lane for failure in outcome.failures}
    by_lane = dict(zip(good, outcome.rewards.tolist(), strict=True))
    outcome.rewards = np.array([by_lane.get(lane.index, 0.0) for lane in live])
    outcome.ended = [(lane, end) for lane, end in outcome.ended if lane not in failed]
    outcome.also_truncated = [lane for lane in outcome.also_truncated if lane not in failed]
    outcome.infos = [(lane, info) for lane, info in outcome.infos if lane not in failed]
    return outcome
