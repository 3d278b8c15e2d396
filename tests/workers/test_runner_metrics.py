"""The report of a runner: names, windows, lifetimes, values that callbacks log, and merged reports of runners."""

from __future__ import annotations

import json
import math
import time
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.workers import EnvRunnerConfig, SingleAgentEnvRunner, merge_metrics
from headrace.workers.metrics.logger import FigureWindow, MetricsLogger, build_report
from headrace.workers.metrics.runner_metrics import MOST_FINISHED, RunnerMetrics
from headrace.workers.metrics.totals import RunnerTotals
from support.envs.toy import Faulty, Walk, diverge, runner, with_fault
from support.envs.toy_agents import multi_runner
from support.runners.comparing import numbers_in


def test_a_report_has_figures_per_cycle_and_lifetime_by_name() -> None:
    with runner(num_envs=2, env_config={"length": 4}) as sampler:
        sampler.sample(num_timesteps=10)
        first = sampler.get_metrics()
        sampler.sample(num_timesteps=4)
        second = sampler.get_metrics()
        third = sampler.get_metrics()
    assert first["num_agent_steps_sampled"] == {"default_agent": 10}
    assert first["num_module_steps_sampled"] == {"default_policy": 10}
    assert first["num_actions_by_agent"] == first["num_actions_by_agent_lifetime"] == {"default_agent": 10}
    assert first["agent_episode_returns_mean"] == {"default_agent": 10.0}
    assert first["module_episode_returns_mean"] == {"default_policy": 10.0}
    assert first["agent_steps"] == {"default_agent": 4.0}
    assert (first["num_episodes"], second["num_episodes"], second["num_episodes_lifetime"]) == (2, 0, 2)
    assert second["num_agent_steps_sampled"] == {"default_agent": 4}
    assert second["num_module_steps_sampled_lifetime"] == {"default_policy": 14}
    assert second["num_env_steps_sampled_lifetime_throughput"] > 0
    # Nothing happened since: counts are 0 or absent, and figures of the window stay.
    assert third["num_env_steps_sampled"] == third["num_env_steps_sampled_lifetime_throughput"] == 0
    assert "num_agent_steps_sampled" not in third
    assert third["num_agent_steps_sampled_lifetime"] == {"default_agent": 14}
    assert third["episode_return_mean"] == 10
    assert all(map(math.isfinite, (n for n in numbers_in({**third, "windows": []}))))
    json.dumps(third)


def test_a_runners_figures_cover_its_share_of_the_newest_episodes() -> None:
    with runner(Walk, metrics_num_episodes_for_smoothing=5, num_workers=2) as sampler:
        chunks = [c for _ in range(4) for c in sampler.sample(num_episodes=3)]
        report = sampler.get_metrics()
    returns = [c.episode_return for c in chunks][-3:]
    lengths = [c.episode_length for c in chunks][-3:]
    assert report["episode_return_mean"] == pytest.approx(np.mean(returns))
    assert (report["episode_return_min"], report["episode_return_max"]) == (min(returns), max(returns))
    assert (report["episode_len_min"], report["episode_len_max"]) == (min(lengths), max(lengths))
    assert report["num_episodes"] == 12


def test_an_episode_counts_once_with_all_its_chunks() -> None:
    with runner(env_config={"length": 7}) as sampler:
        for _ in range(4):
            sampler.sample(num_timesteps=2)
        report = sampler.get_metrics()
    assert (report["num_episodes"], report["episode_len_mean"], report["episode_return_mean"]) == (1, 7, 28)


def test_steps_lost_to_an_env_failure_are_not_counted_as_sampled() -> None:
    with runner(Faulty, num_envs=2, env_config=with_fault(diverge, faulty={1}, every=5)) as sampler:
        chunks = sampler.sample(num_timesteps=40)
        report = sampler.get_metrics()
    assert report["num_env_steps_sampled"] == sum(map(len, chunks))
    assert report["num_env_steps_sampled"] + report["num_env_steps_discarded_lifetime"] == sampler.totals.stepped
    assert report["num_agent_steps_sampled"]["default_agent"] == report["num_env_steps_sampled"]


def test_counters_of_failures_and_lost_steps_continue_over_a_runners_lives() -> None:
    names = ("num_env_step_failures_lifetime", "num_env_rebuilds_lifetime", "num_env_steps_discarded_lifetime")
    config = {"num_envs": 2, "env_config": with_fault(diverge, faulty={1}, every=5)}
    with runner(Faulty, **config) as first, runner(Faulty, **config) as second:
        first.sample(num_timesteps=40)
        second.sample(num_timesteps=40)
        own = [second.totals.env_failures, second.totals.env_rebuilds, second.totals.env_steps_discarded]
        before = [first.get_metrics()[name] for name in names]
        assert min(before) > 0
        for _ in range(2):  # counters that are set twice count once
            second.set_counters(first.get_counters())
            assert [second.get_metrics()[name] for name in names] == before
        second.sample(num_timesteps=40)
        now = [second.totals.env_failures, second.totals.env_rebuilds, second.totals.env_steps_discarded]
        gained = [after - earlier for after, earlier in zip(now, own, strict=True)]
        assert [second.get_counters()[name] for name in names] == list(map(sum, zip(before, gained, strict=True)))


@pytest.mark.parametrize("make", [runner, partial(multi_runner, env_config={"lengths": [5, 5]})])
def test_the_duration_of_an_episode_ends_with_it_and_not_at_the_cut(make: Any) -> None:
    """The second episode lasts at most from the end of the first to the beginning of the third."""
    ended: list[float] = []
    begun: list[float] = []
    functions = {
        "on_episode_end": lambda: ended.append(time.perf_counter()),
        "on_episode_created": lambda: begun.append(time.perf_counter()),
    }
    with make(callbacks=[functions], metrics_num_episodes_for_smoothing=1) as sampler:
        sampler.sample(num_timesteps=14)
        report = sampler.get_metrics()
    assert (len(ended), len(begun)) == (2, 3)
    assert 0 < report["episode_duration_sec_mean"] <= begun[2] - ended[0]


def test_each_reduction_of_logged_values() -> None:
    logger = MetricsLogger(window=4)
    for value in (1, 5, 2, 8, 3):
        for reduce in ("mean", "min", "max", "item", "p50", "sum", "lifetime_sum"):
            logger.log_value(("mine", reduce), value, reduce=reduce)
    logger.log_value("narrow", 7, window=1)
    logger.log_value("narrow", 9, window=1)
    with logger.log_time("took_s"):
        pass
    first = build_report(logger.take_sums(), logger.windows())
    again = build_report(logger.take_sums(), logger.windows())
    expected = {"mean": 4.5, "min": 2, "max": 8, "item": 3, "p50": 4, "sum": 19, "lifetime_sum": 19}
    assert first["mine"] == expected
    assert again["mine"] == {**expected, "sum": 0}
    assert first["narrow"] == 9
    assert first["took_s"] > 0


def test_the_logger_takes_rllibs_arguments_or_raises_with_its_own_names() -> None:
    logger = MetricsLogger(window=4, reserved=["num_episodes"])
    for value in (1, 3):
        logger.log_value("cleared", value, reduce="sum", clear_on_reduce=True)
        logger.log_value("kept", value, reduce="sum", clear_on_reduce=False)
        logger.log_value("mean", value, clear_on_reduce=False, ema_coeff=None)
    logger.log_dict({"speed": 2, "legs": {"left": 3, "right": 5}}, key=("body", "now"), reduce="item")
    logger.log_dict({"cleared": 2}, reduce="sum")
    assert (logger.peek("cleared"), logger.peek("kept"), logger.peek("mean")) == (6, 4, 2)
    assert logger.peek(("body", "now", "legs", "right")) == 5
    assert logger.peek("absent", default=None) is None
    with pytest.raises(KeyError, match="nothing was logged as body/now"):
        logger.peek(("body", "now"))
    report = build_report(logger.take_sums(), logger.windows())
    assert report["body"] == {"now": {"speed": 2, "legs": {"left": 3, "right": 5}}}
    assert (logger.peek("cleared"), logger.peek("kept")) == (0, 4)
    for arguments, words in (({"ema_coeff": 0.1}, "take window=n"), ({"clear_on_reduce": True}, "take reduce='sum'")):
        with pytest.raises(ValueError, match=words):
            logger.log_value("other", 1.0, **arguments)
    with pytest.raises(ValueError, match="num_episodes is the runner's own"):
        logger.log_dict({"num_episodes": 1})
    with pytest.raises(AttributeError, match=r"no attribute 'set_value'; take log_value\(name, value, reduce='item'\)"):
        logger.set_value("x", 1)
    with pytest.raises(KeyError, match="no figure 'episode_reward_mean'; take episode_return_mean"):
        report["episode_reward_mean"]
    with pytest.raises(KeyError, match="no figure 'episode_return_mean'; a figure without values is absent"):
        report["episode_return_mean"]


@pytest.mark.parametrize(
    ("name", "value", "reduce", "message"),
    [
        ("x", math.nan, "mean", "was given nan"),
        ("x", math.inf, "mean", "was given inf"),
        ("x", 10**400, "mean", "metric x was given 1000.*, which is no single number"),
        pytest.param("x", 10**5000, "mean", "metric x was given a int .*, which is no single", id="5,000 digits"),
        ("x", [1.0], "sum", r"metric x was given \[1.0\], which is no single number"),
        ("num_episodes", 1, "sum", "is the runner's own"),
        ("known", 1, "max", "is reduced by 'mean', not 'max'"),
        (("known", "deeper"), 1, "mean", "one name for two things"),
        ("x", 1, "median", "is none of mean, min"),
        ("x", 1, "p101", "is none of mean, min"),
    ],
)
def test_the_logger_refuses_a_bad_name_value_or_reduction(name: Any, value: Any, reduce: str, message: str) -> None:
    logger = MetricsLogger(10, ["num_episodes"])
    logger.log_value("known", 1)
    with pytest.raises(ValueError, match=message):
        logger.log_value(name, value, reduce=reduce)
    assert build_report(logger.take_sums(), logger.windows())["known"] == 1


def test_merged_reports_equal_the_figures_of_all_episodes_together() -> None:
    class Logging:
        def on_episode_end(self, metrics_logger: Any, episode: Any) -> None:
            metrics_logger.log_value("longest", len(episode), reduce="max")
            metrics_logger.log_value("ends", 1, reduce="sum")

    reports, chunks = [], []
    for worker_index in range(3):
        with runner(Walk, worker_index=worker_index, num_envs=worker_index + 1, callbacks=[Logging]) as sampler:
            chunks += sampler.sample(num_timesteps=200)
            reports.append(sampler.get_metrics())
    done = [c for c in chunks if c.is_done]
    merged = merge_metrics(json.loads(json.dumps(reports)))
    returns = [c.episode_return for c in done]
    assert merged["num_env_steps_sampled"] == sum(map(len, chunks))
    assert merged["num_agent_steps_sampled_lifetime"] == {"default_agent": sum(map(len, chunks))}
    assert merged["num_episodes"] == merged["ends"] == len(done)
    assert merged["episode_return_mean"] == math.fsum(returns) / len(returns)
    assert (merged["episode_return_min"], merged["episode_return_max"]) == (min(returns), max(returns))
    assert merged["longest"] == merged["episode_len_max"] == max(c.episode_length for c in done)
    assert merged["num_env_steps_sampled_lifetime_throughput"] == pytest.approx(
        sum(r["num_env_steps_sampled_lifetime_throughput"] for r in reports)
    )


@given(st.lists(st.lists(st.floats(-1e9, 1e9), max_size=6), min_size=1, max_size=5), st.randoms())
@settings(max_examples=100)
def test_merging_does_not_depend_on_the_grouping(groups: list[list[float]], random: Any) -> None:
    def report(values: list[float]) -> dict[str, Any]:
        windows = [FigureWindow((f"v_{kind}",), kind, values) for kind in ("mean", "min", "max", "p90")]
        return build_report({("count",): len(values), ("by", "name"): len(values)}, windows)

    whole = report([value for group in groups for value in group])
    parts = [report(group) for group in groups]
    at_once, pairwise = merge_metrics(parts), parts[0]
    for part in parts[1:]:
        pairwise = merge_metrics([pairwise, part])
    for merged in (at_once, pairwise):
        assert {k: v for k, v in merged.items() if k != "windows"} == {
            k: pytest.approx(v, rel=1e-12) if k == "v_p90" else v for k, v in whole.items() if k != "windows"
        }
    random.shuffle(parts)
    assert merge_metrics(parts).get("v_mean") == whole.get("v_mean")


def test_a_report_counts_steps_and_returns_by_agent_and_module() -> None:
    metrics = RunnerMetrics(100, RunnerTotals())
    metrics.count_steps({"a": 3, "b": 5}, {"shared": 8}, {"a": 4, "b": 5})
    metrics.add_episode(4.0, 5, 0.1, {"a": (1.0, 3), "b": (3.0, 5)}, {"shared": 4.0})
    metrics.add_episode(6.0, 3, 0.1, {"a": (6.0, 3)}, {"shared": 6.0})
    report = metrics.report()
    assert report["episode_return_mean"] == 5
    assert report["agent_episode_returns_mean"] == {"a": 3.5, "b": 3.0}
    assert report["agent_steps"] == {"a": 3, "b": 5}
    assert report["module_episode_returns_mean"] == {"shared": 5}
    assert report["num_agent_steps_sampled"] == {"a": 3, "b": 5}
    assert report["num_actions_by_agent"] == report["num_actions_by_agent_lifetime"] == {"a": 4, "b": 5}
    merged = merge_metrics([report, report])
    assert (merged["num_actions_by_agent"], merged["num_agent_steps_sampled"]) == ({"a": 8, "b": 10}, {"a": 6, "b": 10})
    assert metrics.take_finished() == [(4.0, 5), (6.0, 3)]


def test_a_runner_keeps_a_bounded_number_of_finished_episodes() -> None:
    sampler = SingleAgentEnvRunner(EnvRunnerConfig(env="CartPole-v1", num_envs=8, seed=0))
    metrics = sampler._metrics
    metrics._add_episodes([1.0] * 2 * MOST_FINISHED, [1] * 2 * MOST_FINISHED)
    assert len(sampler.take_finished_episodes()) == MOST_FINISHED
    assert sampler.take_finished_episodes() == []
    assert max(len(kept) for kept in (metrics._returns, metrics._lengths, metrics._durations)) <= 100
    sampler.stop()
