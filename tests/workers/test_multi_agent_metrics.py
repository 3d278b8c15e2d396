"""Metrics of the multi-agent runner, figure by figure, against the record of envs whose agents come and go."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from headrace.workers import merge_metrics
from support.envs.toy_agents import Together, check_books, multi_runner, scheduled
from support.runners.comparing import numbers_in

Truth = list[dict[str, Any]]
POLICIES: dict[str, Any] = {
    "policies": ["even", "odd"],
    "policy_mapping_fn": lambda agent, _: ("even", "odd")[int(agent[1:]) % 2],
}


def _sampled(truth: Truth, steps: int, **settings: Any) -> tuple[dict[str, Any], Truth]:
    """The report of a runner with one env, cut every 7 steps, and the episodes that it finished."""
    with multi_runner(scheduled(truth), rollout_fragment_length=7, **POLICIES, **settings) as sampler:
        while sampler.totals.env_steps_delivered < steps:
            sampler.sample_fragment()
        return sampler.get_metrics(), [episode for episode in truth if episode["over"]]


def _returns(episode: dict[str, Any], agents: Any = None) -> float:
    """Of agents that acted: what others got had no step to belong to."""
    return sum(
        reward
        for agent, reward in episode["rewards"].items()
        if episode["actions"][agent] and (agents is None or agent in agents)
    )


def test_counters_match_the_envs_own_record() -> None:
    truth: Truth = []
    report, done = _sampled(truth, 2100)
    assert report["num_env_steps_sampled"] == report["num_env_steps_sampled_lifetime"] == sum(e["t"] for e in truth)
    assert report["num_episodes"] == report["num_episodes_lifetime"] == len(done)
    acted = {a: sum(len(e["actions"][a]) for e in truth) for a in ("a0", "a1", "a2")}
    actions = report["num_actions_by_agent"]
    assert actions == report["num_actions_by_agent_lifetime"]
    assert all(acted[a] - 1 <= actions[a] <= acted[a] for a in acted)  # the last action may hang
    sampled = report["num_agent_steps_sampled"]
    # Observations of steps, not of resets, of agents that play: one that is first seen at the end does not.
    observed = {a: sum(int(row[0] > 0) for e in truth if e["actions"][a] for row in e["seen"][a]) for a in acted}
    assert sampled == observed
    assert sampled != actions
    assert sampled == report["num_agent_steps_sampled_lifetime"]
    modules = {"even": sampled["a0"] + sampled["a2"], "odd": sampled["a1"]}
    assert report["num_module_steps_sampled"] == report["num_module_steps_sampled_lifetime"] == modules


def test_episode_figures_cover_the_newest_episodes_with_all_their_chunks() -> None:
    report, done = _sampled([], 2100, metrics_num_episodes_for_smoothing=20, num_workers=2)
    newest = done[-10:]
    returns, lengths = [_returns(e) for e in newest], [e["t"] for e in newest]
    assert report["episode_return_mean"] == pytest.approx(np.mean(returns))
    assert (report["episode_return_min"], report["episode_return_max"]) == (min(returns), max(returns))
    assert report["episode_len_mean"] == pytest.approx(np.mean(lengths))
    assert (report["episode_len_min"], report["episode_len_max"]) == (min(lengths), max(lengths))
    assert report["episode_duration_sec_mean"] > 0
    for agent in ("a0", "a1", "a2"):  # each over the newest episodes in which it took part
        own = [e for e in done if e["actions"][agent]][-10:]
        assert report["agent_episode_returns_mean"][agent] == pytest.approx(np.mean([_returns(e, agent) for e in own]))
        assert report["agent_steps"][agent] == pytest.approx(np.mean([len(e["actions"][agent]) for e in own]))
    for module, agents in (("even", ("a0", "a2")), ("odd", ("a1",))):
        own = [e for e in done if any(e["actions"][a] for a in agents)][-10:]
        mean = np.mean([_returns(e, agents) for e in own])
        assert report["module_episode_returns_mean"][module] == pytest.approx(mean)


def test_get_metrics_starts_a_new_cycle_and_lifetime_counters_continue() -> None:
    with multi_runner(env_config={"lengths": [2, 4]}) as sampler:
        empty = sampler.get_metrics()
        sampler.sample(num_timesteps=6)
        first = sampler.get_metrics()
        sampler.sample(num_timesteps=6)
        second, third = sampler.get_metrics(), sampler.get_metrics()
    assert not any(value for name, value in empty.items() if name not in ("windows", "time_s_lifetime"))
    assert (first["num_env_steps_sampled"], first["num_episodes"]) == (6, 1)
    assert (second["num_env_steps_sampled"], second["num_env_steps_sampled_lifetime"]) == (6, 12)
    assert (second["num_episodes"], second["num_episodes_lifetime"]) == (2, 3)
    assert second["num_agent_steps_sampled"] == {"a0": 2, "a1": 6}
    assert second["num_agent_steps_sampled_lifetime"] == {"a0": 6, "a1": 12}
    assert second["num_module_steps_sampled_lifetime"] == {"shared": 18}
    assert second["num_env_steps_sampled_lifetime_throughput"] > 0
    assert third["num_env_steps_sampled"] == third["num_env_steps_sampled_lifetime_throughput"] == 0
    assert third["episode_return_mean"] == 1 + 2 + 2 + 3 + 4 + 5
    for report in (empty, first, second, third):
        assert all(map(math.isfinite, numbers_in({**report, "windows": []})))
        json.dumps(report)


def test_agents_with_integer_ids_are_counted_by_the_text_of_the_id() -> None:
    class Numbered(Together):
        def __init__(self, config: Any = None) -> None:
            super().__init__(config)
            self.possible_agents = [0, 1]  # type: ignore[list-item]
            self.observation_spaces = {i: self.observation_spaces[f"a{i}"] for i in (0, 1)}
            self.action_spaces = {i: self.action_spaces[f"a{i}"] for i in (0, 1)}

        def step(self, actions: dict[Any, Any]) -> Any:
            answer = super().step({f"a{i}": action for i, action in actions.items()})
            return [{int(a[1:]) if a != "__all__" else a: v for a, v in part.items()} for part in answer]

    with multi_runner(Numbered) as sampler:
        chunks = sampler.sample(num_episodes=1)
        report = sampler.get_metrics()
    assert {c.agent_id for c in chunks} == {"0", "1"}
    assert report["num_agent_steps_sampled"] == report["agent_steps"] == {"0": 5, "1": 5}


def test_merged_reports_equal_the_report_of_one_runner_with_all_episodes() -> None:
    reports, truth = [], []
    for worker_index in range(3):
        part: Truth = []
        report, done = _sampled(part, 700, worker_index=worker_index)
        reports.append(report)
        truth += done
    merged = merge_metrics(json.loads(json.dumps(reports)))
    returns = [_returns(e) for e in truth]
    assert merged["num_episodes"] == len(truth)
    assert merged["episode_return_mean"] == pytest.approx(np.mean(returns))
    assert (merged["episode_return_min"], merged["episode_return_max"]) == (min(returns), max(returns))
    for agent in ("a0", "a1", "a2"):
        own = [_returns(e, agent) for e in truth if e["actions"][agent]]
        assert merged["agent_episode_returns_mean"][agent] == pytest.approx(np.mean(own))
        steps = [r["num_agent_steps_sampled"][agent] for r in reports]
        assert merged["num_agent_steps_sampled"][agent] == sum(steps)
    assert merged["num_module_steps_sampled"]["odd"] == sum(r["num_module_steps_sampled"]["odd"] for r in reports)
    assert merged["agent_rewards_lost_lifetime"] == sum(r["agent_rewards_lost_lifetime"] for r in reports)


LOST = (
    "num_env_step_failures_lifetime",
    "num_env_rebuilds_lifetime",
    "num_env_steps_discarded_lifetime",
    "num_agent_steps_discarded_lifetime",
    "num_agent_rewards_lost_lifetime",
    "num_final_observations_repeated_lifetime",
    "num_final_steps_dropped_lifetime",
)


@pytest.mark.parametrize("length", [3, 9])
def test_discarded_steps_are_counted_in_env_steps_and_in_agent_steps(length: int) -> None:
    settings = {"rollout_fragment_length": length, "env_restart_attempts": 10**5}
    with multi_runner(scheduled([], fails=0.02), num_envs=4, **settings) as sampler:  # type: ignore[arg-type]
        for _ in range(80):
            sampler.sample_fragment()
            totals = sampler.totals
            assert totals.env_steps == totals.env_steps_delivered + totals.env_steps_discarded
            check_books(sampler)
        sampler.sample(num_timesteps=10, random_actions=True)
        sampler.sample(num_episodes=2)
        report = sampler.get_metrics()
        assert totals.env_failures > 5
    assert report["num_env_steps_sampled"] + report["num_env_steps_discarded_lifetime"] == totals.env_steps
    with multi_runner() as restored:
        restored.set_state(sampler.get_state(components=[]))
        again = restored.get_metrics()
    assert {name: again[name] for name in LOST} == {name: report[name] for name in LOST}
    assert min(again[name] for name in LOST if "final" not in name) > 0
    assert report["num_agent_steps_discarded_lifetime"] == sum(totals.discarded.values())
    assert sum(report["num_actions_by_agent"].values()) == totals.delivered


def test_a_restored_runner_goes_on_counting() -> None:
    with multi_runner(env_config={"lengths": [2, 4]}) as first, multi_runner(env_config={"lengths": [2, 4]}) as second:
        first.sample(num_timesteps=8)
        second.set_state(first.get_state())
        second.sample(num_timesteps=4)
        report = second.get_metrics()
    assert (report["num_env_steps_sampled"], report["num_env_steps_sampled_lifetime"]) == (4, 12)
    assert report["num_episodes_lifetime"] == 3
    assert report["num_agent_steps_sampled_lifetime"] == {"a0": 6, "a1": 12}
    assert report["num_module_steps_sampled_lifetime"] == {"shared": 18}


def test_callbacks_may_log_metrics_but_not_under_the_runners_names() -> None:
    def log(episode: Any, metrics_logger: Any) -> None:
        for agent, view in episode.agents.items():
            metrics_logger.log_value(("longest", agent), len(view), reduce="max")

    with multi_runner(callbacks=[{"on_episode_end": log}], env_config={"lengths": [2, 4]}) as sampler:
        sampler.sample(num_episodes=2)
        assert sampler.get_metrics()["longest"] == {"a0": 2, "a1": 4}
        for name in sampler.get_metrics().keys() - {"longest"}:
            with pytest.raises(ValueError, match="is the runner's own"):
                sampler._metrics.logger.log_value(name, 1)


def test_a_runner_without_an_env_reports_that_nothing_was_sampled() -> None:
    with multi_runner(None) as sampler:
        assert sampler.get_metrics()["num_env_steps_sampled"] == 0
        assert sampler.running_episodes() == []
