"""The seconds that a runner spends in each part: they sum to the elapsed time, and the slow part has most of them."""

from __future__ import annotations

import time
from typing import Any

import pytest

from headrace.schemas.accounts.worker_figures import TIME_PARTS
from headrace.workers import merge_metrics
from headrace.workers.connectors import FlattenObservations
from headrace.workers.modules.actor_critic import actor_critic
from support.envs.toy import Counting, runner
from support.envs.toy_agents import Together, multi_runner

SLOW_S = 0.004


class SlowEnv(Counting):
    def step(self, action: Any) -> Any:
        time.sleep(SLOW_S)
        return super().step(action)


class SlowReset(Counting):
    def reset(self, **how: Any) -> Any:
        time.sleep(SLOW_S)
        return super().reset(**how)


class SlowTogether(Together):
    def step(self, actions: Any) -> Any:
        time.sleep(SLOW_S)
        return super().step(actions)


class SlowConnector(FlattenObservations):
    def process(self, rows: Any) -> Any:
        time.sleep(SLOW_S)
        return super().process(rows)


def slow_module(spaces: Any) -> Any:
    module = actor_critic(spaces)
    fast = module.numpy_act()

    def act(*args: Any) -> Any:
        time.sleep(SLOW_S)
        return fast(*args)

    module.numpy_act = lambda: act  # type: ignore[method-assign]
    return module


SLOW: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "an env": ("env", runner, {"env": SlowEnv}),
    "resets": ("env", runner, {"env": SlowReset, "env_config": {"length": 1}}),
    "an env elsewhere": (
        "env",
        runner,
        {"env": "support.envs.troubled:Slow", "env_config": {"step_s": SLOW_S}, "env_placement": "process"},
    ),
    "an env of several agents": ("env", multi_runner, {"env": SlowTogether}),
    "a module": ("inference", runner, {"module": slow_module}),
    "a connector": ("connectors", runner, {"env_to_module": [SlowConnector]}),
}


@pytest.mark.parametrize("case", SLOW)
def test_the_time_by_part_sums_to_the_elapsed_time_and_shows_the_slow_part(case: str) -> None:
    slow, make, settings = SLOW[case]
    with make(**settings) as sampler:
        sampler.sample(num_timesteps=2)
        before, begun = sampler.time_by_part(), time.perf_counter()
        for _ in range(2):
            sampler.sample(num_timesteps=25)
        after, wall_s = sampler.time_by_part(), time.perf_counter() - begun
        report = sampler.get_metrics()
    spent = {part: after[part] - before[part] for part in TIME_PARTS}
    assert min(spent.values()) >= 0
    assert sum(spent.values()) == pytest.approx(wall_s, rel=0.05)
    assert spent[slow] > 0.5 * wall_s, spent
    assert report["time_s_lifetime"][slow] >= after[slow]
    assert merge_metrics([report, report])["time_s_lifetime"][slow] == 2 * report["time_s_lifetime"][slow]
