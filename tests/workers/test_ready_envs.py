"""Envs stepped independently: each lane takes the same steps as inline, and a cut loses no step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.schemas.accounts.ledger import Discard
from headrace.schemas.chunks.chunk import ChunkEnd, EpisodeChunk
from headrace.schemas.errors import ConfigError
from headrace.workers import EnvRunnerConfig, MultiAgentEnvRunner, RunnerCallback, SingleAgentEnvRunner
from headrace.workers.agents.examples import two_carts
from support.envs.toy import check_books
from support.envs.troubled import Gate
from support.runners.call_rate import IDLE, calls_a_second
from support.runners.process_driver import is_running
from support.runners.ready import READY, SETTINGS, life, pieced, pieced_as_far

pytestmark = pytest.mark.processes

by_readiness = pytest.mark.parametrize("ready", READY)


def runner(ready: str, env: str = "support.envs.troubled:Jittery", **settings: Any) -> SingleAgentEnvRunner:
    defaults = {"num_envs": 4, "envs_per_process": 2, "seed": 3}
    placed = {"env_placement": "process", **READY[ready]} if ready != "inline" else {}
    return SingleAgentEnvRunner(EnvRunnerConfig(env=env, **{**defaults, **placed, **settings}), run_uid="test")


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("ready", "kind"), list(zip([*READY, *READY], [*SETTINGS, "memory"], strict=True)))
def test_a_lane_takes_the_same_steps_in_any_order_of_ready_envs(ready: str, kind: str) -> None:
    """Each half has its own forward pass, which may round differently, so halves are compared with halves."""
    like = ready if ready == "by halves" else "inline"
    settings = {"rollout_fragment_length": 7, **SETTINGS[kind]}
    with runner(ready, **settings) as sampler:
        chunks = [chunk for _ in range(9) for chunk in sampler.sample_fragment()]
        check_books(sampler)
        assert sampler.totals.delivered == sum(map(len, chunks))
        assert not sampler.totals.discarded
    found = pieced(chunks)
    by_step = {"batch_mode": "truncate_episodes", "rollout_fragment_length": 1, "env_config": {"hurry": True}}
    with runner(like, **{**settings, **by_step}) as inline:
        expected = pieced_as_far(inline, chunks)
    for episode, parts in found.items():
        steps = life(expected[episode])
        assert life(parts) == steps[: sum(map(len, parts))]
        before = {chunk.t_start: chunk.state_in for chunk in expected[episode]}
        for chunk in parts:
            if like == "inline" or chunk.t_start in before:
                assert {n: v.tobytes() for n, v in chunk.state_in.items()} == {
                    n: v.tobytes() for n, v in before[chunk.t_start].items()
                }
    assert sum(map(len, found)) > 20


@pytest.mark.parametrize(("ready", "held_up"), [("at once", [0]), ("by halves", [0, 2])])
def test_a_slow_env_delays_only_itself_or_its_half(ready: str, held_up: list[int], tmp_path: Path) -> None:
    gate, config = Gate(tmp_path), {"gate": str(tmp_path), "lane": 0}
    with runner(ready, "support.envs.troubled:Gated", env_config=config, envs_per_process=1, num_envs=3) as sampler:
        while not gate.reached:
            sampler.sample(num_timesteps=20)  # the gated one may be reset last
        chunks = sampler.sample(num_timesteps=120)
        gate.open()
    steps = [sum(len(c) for c in chunks if c.env_index == lane) for lane in range(3)]
    assert sum(steps) >= 120
    assert steps[0] == 0
    assert all(steps[lane] <= 1 for lane in held_up), "one of its half may have had an answer on its way"
    # How the others share the steps is the machine's business.
    assert sum(steps[lane] for lane in range(3) if lane not in held_up) >= 119


def test_an_action_pending_at_a_cut_keeps_its_weights_version(tmp_path: Path) -> None:
    gate, config = Gate(tmp_path), {"gate": str(tmp_path), "lane": 0}
    with runner("at once", "support.envs.troubled:Gated", env_config=config, envs_per_process=1, num_envs=2) as sampler:
        weights = sampler.get_state("rl_module")["rl_module"]
        sampler.set_weights(weights, seq=1)
        while not gate.reached:
            sampler.sample(num_timesteps=30)
        sampler.set_weights(weights, seq=2)
        gate.open()
        seqs: dict[int, list[int]] = {lane: [] for lane in range(2)}
        while len(seqs[0]) < 2:
            for chunk in sampler.sample(num_timesteps=30):
                seqs[chunk.env_index] += chunk.weights_seq.tolist()
    assert seqs[0][0] == 1
    assert set(seqs[0][1:]) == {2}


@by_readiness
def test_every_episode_ends_in_a_final_chunk_or_an_abort_marker(ready: str) -> None:
    with runner(ready, rollout_fragment_length=4) as sampler:
        chunks = list(sampler.sample_fragment())
        episodes = sampler.sample(num_episodes=7, end_markers=True)
        assert 7 <= sum(chunk.end is ChunkEnd.TERMINATED for chunk in episodes) < 7 + 4
        chunks += episodes
        chunks += sampler.sample(num_timesteps=13, end_markers=True)
        chunks += sampler.sample(num_timesteps=13, random_actions=True, force_reset=True, end_markers=True)
        chunks += sampler.sample(num_timesteps=13, force_reset=True, end_markers=True)
        chunks += sampler.sample(num_timesteps=13, end_markers=True)
        chunks += sampler.discard_open(Discard.SHUTDOWN)
        assert sampler.totals.open == 0
        check_books(sampler)
        pids: Any = sampler._sampler.envs
        pids = pids._backend.pids
        goes_on = sampler.sample(num_timesteps=13)
        assert all(chunk.t_start == 0 for chunk in goes_on)
    assert not any(map(is_running, pids))
    ends = {episode: [chunk.end for chunk in parts] for episode, parts in pieced(chunks).items()}
    assert all(ChunkEnd.ONGOING not in told[-1:] for told in ends.values())
    for chunk in chunks:
        if len(chunk):
            times = range(chunk.t_start + 1, chunk.t_start + len(chunk) + 1)
            assert [info["time"] for info in chunk.infos[1:]] == list(times)


@by_readiness
def test_an_exception_from_on_poll_loses_no_step(ready: str) -> None:
    class Enough(Exception):
        pass

    def stop() -> None:
        raise Enough

    with runner(ready, "support.envs.troubled:Slow", env_config={"step_s": 0.05}, rollout_fragment_length=4) as sampler:
        for _ in range(3):
            with pytest.raises(Enough):
                sampler.sample_fragment(stop)
        pieced(chunk for _ in range(3) for chunk in sampler.sample_fragment())
        assert not sampler.totals.discarded
        check_books(sampler)


class Account(RunnerCallback):
    """What became of every episode that was created."""

    def __init__(self) -> None:
        self.created: list[str] = []
        self.over: list[str] = []
        self.steps: dict[str, int] = defaultdict(int)

    def on_episode_created(self, episode: Any, **_: Any) -> None:
        self.created.append(episode.episode_id)

    def on_episode_step(self, episode: Any, **_: Any) -> None:
        self.steps[episode.episode_id] += 1
        assert len(episode) == self.steps[episode.episode_id]

    def on_episode_end(self, episode: Any, **_: Any) -> None:
        self.over.append(episode.episode_id)

    def on_episode_aborted(self, episode: Any, **_: Any) -> None:
        self.over.append(episode.episode_id)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("ready", "watched"), list(zip(READY, [True, False, True], strict=True)))
def test_under_a_storm_of_faults_every_lost_step_has_a_reason(ready: str, watched: bool) -> None:
    account = Account()
    settings = {"num_envs": 4, "env_restart_attempts": 100, "callbacks": [account] if watched else []}
    with runner(
        ready, "support.envs.troubled:Unsound", env_config={"deadly": 0.003}, rollout_fragment_length=100, **settings
    ) as sampler:
        chunks: list[EpisodeChunk] = []
        for _ in range(5):
            chunks += sampler.sample_fragment()
            check_books(sampler)
        for chunk in chunks:
            if chunk.end is not ChunkEnd.ABORTED:
                times = np.arange(chunk.t_start, chunk.t_start + len(chunk) + 1)
                assert chunk.obs[:, 0].tolist() == times.tolist()
                assert chunk.rewards.tolist() == times[1:].tolist()
        totals = sampler.totals
        assert totals.env_failures > 3
        assert set(totals.discarded) <= {"env_exception", "env_bad_data", "env_crash", "env_neighbour"}
        running = [view.episode_id for view in sampler.running_episodes()]
    last = {episode: parts[-1].end for episode, parts in pieced(chunks).items()}
    assert {episode for episode, end in last.items() if end is ChunkEnd.ONGOING} <= set(running)
    if watched:
        told = account.over + running
        assert len(set(told)) == len(told)
        assert set(told) <= set(account.created)


def test_while_an_env_hangs_the_others_go_on() -> None:
    config = {"lane": 1, "faults": {"step": "hangs with the lock"}}
    settings = {"env_step_timeout_s": 2.5, "envs_per_process": 1, "num_envs": 3}
    steps: dict[int, int] = defaultdict(int)
    with runner("at once", "support.envs.troubled:Troubled", env_config=config, **settings) as sampler:
        while not sampler.totals.env_failures:
            for chunk in sampler.sample(num_timesteps=30):
                steps[chunk.env_index] += len(chunk)
        # The one that hangs answers four times. Others that waited for it would take a fifth step at most.
        assert min(steps[0], steps[2]) > 10
        assert set(sampler.totals.discarded) <= {"env_hang"}
        check_books(sampler)


def test_a_runner_by_halves_restores_the_state_of_a_runner_at_once() -> None:
    with runner("at once", num_envs=1) as one, runner("by halves", num_envs=1) as other:
        one.sample(num_episodes=3)
        other.set_state(one.get_state())
        expected, found = pieced(one.sample(num_episodes=3)), pieced(other.sample(num_episodes=3))
    assert [life(parts) for parts in found.values()] == [life(parts) for parts in expected.values()]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("settings", [{"double_buffering": True}, {"remote_env_batch_wait_ms": 0}, {}])
def test_a_runner_that_waits_for_slow_envs_does_not_spin(settings: dict[str, Any]) -> None:
    config = EnvRunnerConfig(
        env="support.envs.troubled:Slow", num_envs=4, envs_per_process=1, env_placement="process", seed=3,
        env_config={"step_s": 0.2}, **settings,
    )  # fmt: skip
    with SingleAgentEnvRunner(config) as sampler:
        sampler.sample(num_timesteps=8)
        assert calls_a_second(lambda: sampler.sample(num_timesteps=24)) < IDLE


@pytest.mark.parametrize("settings", [{"double_buffering": True}, {"remote_env_batch_wait_ms": 0}])
def test_double_buffering_and_a_batch_wait_are_refused_for_inline_envs(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"{next(iter(settings))}:? is for envs in processes"):
        SingleAgentEnvRunner(EnvRunnerConfig(env="CartPole-v1", **settings))
    with pytest.raises(ConfigError, match=rf"{next(iter(settings))}:? is for envs in processes"):
        MultiAgentEnvRunner(EnvRunnerConfig(env=two_carts, policies=["short", "long"], **settings))


def test_double_buffering_and_a_batch_wait_are_refused_together() -> None:
    with pytest.raises(ConfigError, match=r"remote_env_batch_wait_ms = 2 .*double_buffering"):
        EnvRunnerConfig(env_placement="process", double_buffering=True, remote_env_batch_wait_ms=2)


def test_a_negative_batch_wait_is_refused() -> None:
    wait: Callable[..., Any] = EnvRunnerConfig
    with pytest.raises(ConfigError, match="remote_env_batch_wait_ms"):
        wait(remote_env_batch_wait_ms=-1)
