"""Envs on other hosts stepped independently: a slow host delays no other host, and lanes take the same steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.workers import EnvRunnerConfig, SingleAgentEnvRunner
from support.envs.toy import check_books
from support.fleets.env_hosts import EnvHosts
from support.runners.call_rate import IDLE, calls_a_second
from support.runners.ready import READY, SETTINGS, life, pieced, pieced_as_far
from support.waiting import wait_until

pytestmark = pytest.mark.processes


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[EnvHosts]:
    with EnvHosts(tmp_path) as started:
        yield started


def runner(hosts: EnvHosts | None, env: str, **settings: Any) -> SingleAgentEnvRunner:
    placed = {"env_placement": "remote", **hosts.at} if hosts is not None else {}
    defaults = {"num_envs": 4, "seed": 3}
    return SingleAgentEnvRunner(EnvRunnerConfig(env=env, **{**defaults, **placed, **settings}), run_uid="test")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("ready", ["at once", "by halves"])
def test_a_lane_takes_the_same_steps_in_any_order_of_ready_hosts(ready: str, hosts: EnvHosts) -> None:
    settings = {"rollout_fragment_length": 7, **SETTINGS["memory"]}
    by_step = {**settings, "rollout_fragment_length": 1, "env_config": {"hurry": True}}
    # Halves pass by themselves, which may be rounded in another way, so that they are compared with halves.
    like = {"env_placement": "process", **READY[ready]} if ready == "by halves" else {}
    for _ in range(2):
        hosts.start("support.envs.troubled:Jittery", 2)
    with runner(hosts, "support.envs.troubled:Jittery", **READY[ready], **settings) as sampler:
        chunks = [chunk for _ in range(9) for chunk in sampler.sample_fragment()]
        check_books(sampler)
        assert not sampler.totals.discarded
    found = pieced(chunks)
    with runner(None, "support.envs.troubled:Jittery", **like, **by_step) as here:
        expected = pieced_as_far(here, chunks)
    for episode, parts in found.items():
        assert life(parts) == life(expected[episode])[: sum(map(len, parts))]
    assert sum(map(len, found)) > 20


def test_a_slow_env_host_delays_no_other_host_and_is_lost_alone(hosts: EnvHosts, tmp_path: Path) -> None:
    # Its gate stays closed, so that no step of it ends.
    slow = hosts.start("support.envs.troubled:Gated", 1, f'sampling.env_config={{"gate": "{tmp_path}", "lane": 0}}')
    settings = {"remote_env_batch_wait_ms": 0, "env_hosts_lease_s": 3, "num_envs": 3}
    with runner(hosts, "support.envs.troubled:Gated", **settings) as sampler:
        hosts.start("support.envs.troubled:Gated", 2, 'sampling.env_config={"lane": -1}')

        def steps() -> list[int]:
            chunks = sampler.sample(num_timesteps=40)
            return [sum(len(chunk) for chunk in chunks if chunk.env_index == lane) for lane in range(3)]

        wait_until(lambda: all(steps()[1:]), what="the fast host")
        first, *others = map(sum, zip(*(steps() for _ in range(3)), strict=True))
        assert (first, sum(others) >= 120) == (0, True)
        check_books(sampler)
        slow.kill()
        wait_until(lambda: steps() and sampler.totals.env_rebuilds, what="the end of the slow host")
        assert set(sampler.totals.discarded) <= {"env_host_lost"}
        check_books(sampler)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("settings", [{"double_buffering": True}, {"remote_env_batch_wait_ms": 5}])
def test_a_runner_that_waits_for_env_hosts_does_not_spin(settings: dict[str, Any], hosts: EnvHosts) -> None:
    hosts.start("support.envs.troubled:Slow", 2, 'sampling.env_config={"step_s": 0.2}', "sampling.envs_per_process=1")
    with runner(hosts, "support.envs.troubled:Slow", num_envs=2, **settings) as sampler:
        sampler.sample(num_timesteps=4)
        assert calls_a_second(lambda: sampler.sample(num_timesteps=10)) < IDLE
