"""Calls with bad data about several agents raise in the caller and change nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from headrace.schemas.errors import EnvContractError
from headrace.workers.external import Answer
from support.envs.external_agents import idle, see, table
from support.envs.toy_agents import check_books
from support.refusals import refused


@pytest.mark.parametrize(
    ("say", "sentence"),
    [
        (lambda e: e.ask("one", {"x": see(1)}, print), r"agent should be one of \['a', 'b', 'c'\], got 'x' in obs"),
        (
            lambda e: e.ask("one", {"a": see(1), "b": see(np.nan)}, print),
            "observation of agent 'b' should be free of NaN",
        ),
        (
            lambda e: e.ask("one", {"a": np.zeros(3, np.float32)}, print),
            r"observation of agent 'a' .* got float32 \(3,\)",
        ),
        (lambda e: e.ask("one", see(1), print), "observations should be a dict by agent id"),
        (lambda e: e.ask("one", {}, print), "observations should be of an agent that is"),
        (lambda e: e.ask("one", {"c": see(1)}, print), "live agents only, got one of agent 'c', which is done"),
        (lambda e: e.end("one", {"c": see(1)}, print), "live agents only, got one of agent 'c', which is done"),
        (lambda e: e.end("one", {"a": see(1)}, print, truncated=True), r"none of \['b'\], who are truncated"),
        (lambda e: e.log_action("one", {"a": see(1)}, {"a": 1, "b": 1}, print), r"each agent that is to act, \['a'\]"),
        (
            lambda e: e.log_action("one", {"a": see(1), "b": see(1)}, {"a": 1}, print),
            "one of each agent that is to act",
        ),
        (lambda e: e.log_action("one", {"a": see(1)}, {"a": 100}, print), r"action of agent 'a' should be within \[0"),
        (lambda e: e.log_action("one", {"a": see(1)}, 7, print), "actions should be a dict by agent id"),
        (lambda e: e.log_returns("one", {"a": 1.0, "b": float("nan")}), "Reward of agent 'b' should be finite scalar"),
        (lambda e: e.log_returns("one", {"a": 1.0, "x": 1.0}), "'x' in rewards"),
        (lambda e: e.log_returns("one", {"a": 1.0, "c": 1.0}), "live agents only, got 1.0 of agent 'c', which is done"),
        (lambda e: e.log_returns("one", 1.0), "rewards should be a dict by agent id"),
        (lambda e: e.log_returns("one", {"a": 1.0}, {"b": "no dict"}), "info should be a dict, got 'no dict'"),
        (lambda e: e.log_returns("one", {"a": 1.0}, None, {"a": 1}), "terminated should be a bool, got 1"),
        (lambda e: e.log_returns("one", {"a": 1.0}, None, {"__all__": True}), "end_episode.. ends the episode"),
        (lambda e: e.log_returns("one", {"a": 1.0}, None, None, ["a"]), "truncated should be a dict by agent id"),
    ],
)
def test_bad_data_raises_in_the_caller_and_changes_nothing(say: Callable[..., None], sentence: str) -> None:
    with idle() as sampler:
        episodes, answers = table(sampler), list[Answer]()
        episodes.start("one")
        episodes.ask("one", {agent: see(0) for agent in "abc"}, answers.append)
        chunks = list(sampler.sample_fragment())
        episodes.log_returns("one", {}, None, {"c": True})
        episodes.ask("one", {agent: see(1) for agent in "abc"}, answers.append)
        chunks += sampler.sample_fragment()
        assert list(answers[-1].action) == ["a", "b"]
        with pytest.raises(EnvContractError, match=sentence):
            say(episodes)
        episodes.log_returns("one", {"a": 0.0, "c": 0.0}, None, {"c": True})  # as envs that fill their dicts do
        episodes.end("one", {agent: see(2) for agent in "ab"}, answers.append)
        chunks += sampler.sample_fragment()
        assert sum(map(len, chunks)) == 5
        assert sum(float(chunk.rewards.sum()) for chunk in chunks) == 0.0
        assert [answer.error for answer in answers] == [None] * 3
        assert sampler.totals.env_failures == 0
        check_books(sampler)


def test_a_fragment_answers_earlier_requests_even_with_almost_no_time() -> None:
    with idle(external_fragment_max_age_s=1e-9) as sampler:
        episodes, answers = table(sampler), list[Answer]()
        episodes.start("one")
        episodes.ask("one", {"a": see(0)}, answers.append)
        sampler.sample_fragment()
        assert [list(answer.action) for answer in answers] == [["a"]]


def test_a_missing_final_observation_is_repeated_or_its_step_dropped() -> None:
    for choice, steps in (("repeat", 1), ("drop", 0)):
        with idle(missing_final_observation=choice) as sampler:
            episodes = table(sampler)
            episodes.start("one")
            episodes.ask("one", {"a": see(0)}, lambda _: None)
            sampler.sample_fragment()
            episodes.end("one", {}, lambda _: None, truncated=True)
            assert sum(map(len, sampler.sample_fragment())) == steps
            assert sampler.totals.env_failures == 0
            check_books(sampler)


def test_rewards_before_the_first_action_and_concurrent_calls_are_refused() -> None:
    with idle() as sampler:
        episodes, answers = table(sampler), list[Answer]()
        episodes.start("one")
        with refused("no_action"):
            episodes.log_returns("one", {"a": 1.0})
        episodes.ask("one", {"a": see(0)}, answers.append)
        for again in (
            lambda: episodes.ask("one", {"b": see(0)}, answers.append),
            lambda: episodes.log_returns("one", {"a": 1.0}),
        ):
            with refused("busy"):
                again()


def test_log_action_is_refused_where_connectors_map_actions() -> None:
    with idle(module_to_env=["headrace.workers.connectors:UnsquashActions"]) as sampler:
        episodes = table(sampler)
        episodes.start("one")
        with refused("cannot_log", match="module_to_env"):
            episodes.log_action("one", {"a": see(0)}, {"a": 1}, lambda _: None)


def test_the_table_copies_the_observations_and_infos_of_a_call() -> None:
    """The caller may overwrite its arrays after a call."""
    with idle() as sampler:
        episodes, seen = table(sampler), see(3)
        info: dict[str, Any] = {"k": 1}
        episodes.start("one")
        episodes.ask("one", {"a": seen}, lambda _: None)
        seen[:] = 9
        chunks = list(sampler.sample_fragment())
        episodes.log_returns("one", {"a": 0.0}, {"a": info})
        info["k"] = 2
        episodes.end("one", {"a": see(4)}, lambda _: None)
        chunks += sampler.sample_fragment()
        assert chunks[-1].obs[:, 0].tolist() == [3.0, 4.0]
        assert chunks[-1].infos[-1] == {"k": 1}
