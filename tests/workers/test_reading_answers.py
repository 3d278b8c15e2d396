"""Answers of many envs are read together; the result equals that of reading them one by one."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import workers
from headrace.workers.envs import sequential_step
from headrace.workers.envs.sequential_step import MANY, read_each, read_together
from headrace.workers.metrics import timers
from support.envs.toy import runner

MOST_CALLS = 50
"""Python functions that a poll calls, without those of the envs."""
OBSERVATION = np.zeros(2, np.float32)
ENDS = [False, True, np.False_, np.True_, 0, 1, None, np.zeros(1)]
INFOS = [{}, {"a": 1}, None, [], (), type("Infos", (dict,), {})(b=2)]


def _answers() -> st.SearchStrategy[list[Any]]:
    usual = st.just((OBSERVATION, 1.0, False, False, {}))
    whole = st.tuples(st.just(OBSERVATION), st.floats(), st.booleans(), st.booleans(), st.sampled_from(INFOS[:2]))
    odd = st.tuples(
        st.just(OBSERVATION), st.just(1), st.sampled_from(ENDS), st.sampled_from(ENDS), st.sampled_from(INFOS)
    )
    other = st.sampled_from([None, (), (1, 2, 3, 4), (1, 2, 3, 4, 5, 6), [OBSERVATION, 1.0, False, True, {}], "answer"])
    each = st.one_of(usual, usual, usual, whole, odd, other)
    return st.one_of(st.lists(st.one_of(usual, whole), min_size=1), st.lists(each, min_size=1))


@settings(max_examples=400, deadline=None)
@given(answers=_answers())
def test_answers_read_together_equal_answers_read_one_by_one(answers: list[Any]) -> None:
    lanes, failures = list(range(3, 3 + len(answers))), []  # type: ignore[var-annotated]
    good, (observations, rewards, *rest) = read_each(lanes, answers, failures)
    together = read_together(lanes, answers)
    if together is None:
        return
    assert (good, failures) == (lanes, [])
    assert [id(seen) for seen in together[0]] == [id(seen) for seen in observations]
    assert [repr(reward) for reward in together[1]] == [repr(reward) for reward in rewards]
    assert together[2:] == tuple(rest)


@pytest.mark.parametrize("end", ENDS[4:], ids=repr)
@pytest.mark.parametrize("place", [2, 3])
def test_ends_that_are_no_bools_are_not_read_together(end: Any, place: int) -> None:
    odd: list[Any] = [OBSERVATION, 1.0, False, False, {}]
    odd[place] = end
    assert read_together([0, 1], [(OBSERVATION, 1.0, False, True, {}), tuple(odd)]) is None


@pytest.mark.parametrize("info", INFOS[2:], ids=repr)
def test_infos_that_are_not_exactly_dicts_are_not_read_together(info: Any) -> None:
    usual = OBSERVATION, 1.0, False, False
    assert read_together([0, 1], [(*usual, {}), (*usual, info)]) is None


def test_usual_answers_are_read_together() -> None:
    answers = [(OBSERVATION, 1.0, lane == 1, np.bool_(lane == 2), {"a": lane} if lane else {}) for lane in range(4)]
    assert read_together(list(range(4)), answers) is not None


HEADRACE = str(Path(workers.__file__).parents[1])
"""The folder of the package. A clone's own folder is often called headrace too."""


class Still(gym.Env[Any, Any]):
    """An env that always answers the same."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, **_: Any) -> Any:
        return OBSERVATION, {}

    def step(self, _: Any) -> Any:
        return OBSERVATION, 1.0, False, False, {}


def _calls(width: int) -> int:
    """Return how many Python functions one poll of `width` envs calls, without those of the envs."""
    counts: list[int] = []
    count = 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(HEADRACE)

    def mark() -> None:
        nonlocal count
        counts.append(count)
        count = 0

    with runner(lambda _: Still(), num_envs=width, rollout_fragment_length=100) as sampler:
        sampler.sample_fragment()
        before = sys.getprofile()
        sys.setprofile(note)
        try:
            sampler.sample_fragment(on_poll=mark)
        finally:
            sys.setprofile(before)
    return sorted(counts)[len(counts) // 2]  # few polls are timed, which takes more calls


@pytest.mark.parametrize("width", [1, MANY, 8 * MANY])
def test_a_poll_calls_no_function_for_each_env_and_few_in_all(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow polls are timed, which takes more calls; on a busy machine all are slow."""
    monkeypatch.setattr(timers, "SLOW_S", math.inf)
    assert _calls(width) <= MOST_CALLS


def test_many_answers_cost_no_look_at_each(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def noting(lanes: Any, answers: Any, failures: Any) -> Any:
        read.append(len(answers))
        return read_each(lanes, answers, failures)

    monkeypatch.setattr(sequential_step, "read_each", noting)
    for width in (MANY - 1, MANY):
        with runner(lambda _: Still(), num_envs=width, rollout_fragment_length=5) as sampler:
            sampler.sample_fragment()
    assert read == [MANY - 1] * 5
