"""The timers of sampling and of its parts in the report of a runner."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.workers import merge_metrics
from headrace.workers.connectors import MeanStd
from headrace.workers.metrics.timers import EVERY, TIMERS, WINDOW, Timers
from support.envs.toy import Counting, runner
from support.envs.toy_agents import multi_runner


def timers_in(report: dict[str, Any]) -> dict[str, float]:
    assert all(report[name] >= 0 for name in TIMERS if name in report)
    return {name: report[name] for name in TIMERS if name in report}


@pytest.mark.parametrize("num_envs", [1, 4])
def test_a_report_has_the_time_of_each_part(num_envs: int) -> None:
    with runner(Counting, num_envs=num_envs, env_config={"length": 4}, env_to_module=[MeanStd]) as sampler:
        assert timers_in(sampler.get_metrics()) == {}
        sampler.sample(num_timesteps=5 * num_envs)
        once = timers_in(sampler.get_metrics())
        assert set(once) == set(TIMERS) - {"time_between_sampling"}
        assert once["sample_timer"] > once["env_step_timer"] + once["rlmodule_inference_timer"]
        sampler.sample(num_timesteps=num_envs)
        assert set(timers_in(sampler.get_metrics())) == set(TIMERS)


def test_a_multi_agent_runner_reports_the_time_of_each_part() -> None:
    with multi_runner(num_envs=2) as sampler:
        sampler.sample(num_episodes=3)
        names = set(timers_in(sampler.get_metrics()))
    assert names == {"sample_timer", "env_step_timer", "env_reset_timer", "rlmodule_inference_timer"}


def test_random_actions_add_no_inference_time() -> None:
    with runner(Counting) as sampler:
        sampler.sample(num_timesteps=2, random_actions=True)
        assert "rlmodule_inference_timer" not in sampler.get_metrics()


def test_one_poll_of_many_is_timed_and_a_call_that_raises_is_not() -> None:
    timers = Timers()
    assert [timers.is_due() for _ in range(2 * EVERY)].count(True) == 2
    with pytest.raises(ZeroDivisionError):
        timers.timed("env_step_timer", lambda: 1 / 0)()
    assert not any(window.values for window in timers.windows())
    for _ in range(2 * WINDOW):
        assert timers.timed("env_step_timer", lambda: 7)() == 7
    assert {window.path[0]: len(window.values) for window in timers.windows() if window.values} == {
        "env_step_timer": WINDOW
    }


def test_a_report_has_the_weights_version_and_a_merged_report_the_newest() -> None:
    with runner(Counting) as sampler:
        first = sampler.get_metrics()
        sampler.set_weights(sampler.get_state()["rl_module"], seq=9)
        second = sampler.get_metrics()
    assert "weights_seq_no" not in first
    assert second["weights_seq_no"] == 9
    assert merge_metrics([second, first])["weights_seq_no"] == 9
