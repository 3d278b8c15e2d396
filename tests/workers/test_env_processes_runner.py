"""A runner with envs in processes gives the chunks of inline envs, also when another env fails."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from headrace.schemas.chunks.chunk import ChunkEnd, EpisodeChunk
from headrace.schemas.chunks.gymnasium_spaces import to_gym
from headrace.schemas.errors import ConfigError, EnvError, EnvHangError, EnvRestartBudgetError
from headrace.workers import EnvRunnerConfig, MultiAgentEnvRunner, RunnerCallback, SingleAgentEnvRunner
from headrace.workers.envs.spaces import convert
from support.envs.toy import check_books
from support.runners.process_driver import is_running
from support.waiting import wait_until

pytestmark = pytest.mark.processes

FAULTY, NEIGHBOUR, ELSEWHERE = 1, 0, 2


def runner(
    env: str = "support.envs.troubled:Troubled", placement: str = "process", **settings: Any
) -> SingleAgentEnvRunner:
    defaults = {"num_envs": 3, "envs_per_process": 2, "seed": 3}
    config = EnvRunnerConfig(env=env, **{**defaults, "env_placement": placement, **settings})
    return SingleAgentEnvRunner(config, run_uid="test")


def pids(sampler: SingleAgentEnvRunner) -> list[int]:
    pool: Any = sampler._sampler.envs
    return list(pool._backend.pids)


def brief(chunk: EpisodeChunk) -> tuple[Any, ...]:
    columns = {name: column.tobytes() for name, column in chunk.columns.items()}
    arrays = (chunk.obs.tobytes(), chunk.actions.tobytes(), chunk.rewards.tobytes())
    return (chunk.episode_id, chunk.chunk_index, chunk.t_start, chunk.end, chunk.seed, arrays, columns, chunk.infos)


def lives(sampler: SingleAgentEnvRunner, fragments: int, lane: int = ELSEWHERE) -> list[Any]:
    """Sample some fragments and return the chunks of one lane."""
    return [brief(c) for _ in range(fragments) for c in sampler.sample_fragment() if c.env_index == lane]


class Watching:
    """A callback that must be called before a reset."""

    def on_episode_created(self, episode: Any) -> None:
        """Nothing to be done."""


@pytest.mark.one_in(2)
@pytest.mark.parametrize("callbacks", [[], [Watching]])
@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_envs_in_processes_give_bit_identical_chunks_to_inline_envs(env: str, callbacks: list[Any]) -> None:
    found = []
    for placement in ("inline", "process"):
        with runner(env, placement, callbacks=callbacks, rollout_fragment_length=40) as sampler:
            chunks = [chunk for _ in range(4) for chunk in sampler.sample_fragment()]
            chunks += sampler.sample(num_episodes=4)
            chunks += sampler.sample(num_timesteps=50)
            chunks += sampler.sample(num_timesteps=20, force_reset=True, random_actions=True)
            found.append(([brief(chunk) for chunk in chunks], sampler.totals, sampler.get_spaces()))
            check_books(sampler)
    assert found[0] == found[1]


def test_a_state_goes_from_envs_inline_to_envs_in_processes() -> None:
    with runner("CartPole-v1", "inline") as inline, runner("CartPole-v1") as sampler:
        inline.sample(num_episodes=3)
        sampler.set_state(inline.get_state())
        expected, found = inline.sample(num_episodes=3), sampler.sample(num_episodes=3)
        assert [brief(chunk)[5] for chunk in found] == [brief(chunk)[5] for chunk in expected]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("fault", "reasons"),
    [
        ("raises", {"env_exception"}),
        ("NaN reward", {"env_bad_data"}),
        ("segfaults", {"env_crash", "env_neighbour"}),
        ("hangs with the lock", {"env_hang", "env_neighbour"}),
    ],
)
def test_a_fault_is_counted_by_its_reason_and_changes_no_other_process(fault: str, reasons: set[str]) -> None:
    settings = {"env_step_timeout_s": 1.0, "rollout_fragment_length": 3}
    with runner(**settings) as sound:
        expected = lives(sound, 6)
    with runner(env_config={"lane": FAULTY, "faults": {"step": fault}}, **settings) as sampler:
        before = set(pids(sampler))
        found = lives(sampler, 6)
        # Lanes come back while others go on.
        wait_until(lambda: {chunk.env_index for chunk in sampler.sample_fragment()} == {0, 1, 2}, what="all lanes")
        totals = sampler.totals
        assert totals.env_failures == 1
        assert totals.env_rebuilds == len(reasons)
        assert set(totals.discarded) <= reasons
        assert max(reasons, key=lambda reason: reason != "env_neighbour") in totals.discarded
        assert (before == set(pids(sampler))) is (len(reasons) == 1)
        check_books(sampler)
    assert found == expected


class Account(RunnerCallback):
    """A callback that records every created episode and every ended or aborted one."""

    def __init__(self) -> None:
        self.created: list[str] = []
        self.over: list[str] = []
        self.failed = 0

    def on_episode_created(self, episode: Any, **_: Any) -> None:
        self.created.append(episode.episode_id)

    def on_episode_end(self, episode: Any, **_: Any) -> None:
        self.over.append(episode.episode_id)

    def on_episode_aborted(self, episode: Any, **_: Any) -> None:
        self.over.append(episode.episode_id)

    def on_env_failed(self, **_: Any) -> None:
        self.failed += 1


@pytest.mark.parametrize("watched", [False, True])
def test_under_random_faults_every_lost_step_has_a_reason(watched: bool) -> None:
    account = Account()
    settings = {"num_envs": 4, "env_restart_attempts": 100, "callbacks": [account] if watched else []}
    with runner(
        "support.envs.troubled:Unsound", env_config={"deadly": 0.003}, rollout_fragment_length=150, **settings
    ) as sampler:
        last: dict[str, EpisodeChunk] = {}
        for _ in range(5):
            for chunk in sampler.sample_fragment():
                before = last.get(chunk.episode_id)
                assert chunk.chunk_index == (before.chunk_index + 1 if before else 0)
                last[chunk.episode_id] = chunk
                if chunk.end is not ChunkEnd.ABORTED:
                    times = np.arange(chunk.t_start, chunk.t_start + len(chunk) + 1)
                    assert chunk.obs[:, 0].tolist() == times.tolist()
                    assert chunk.rewards.tolist() == times[1:].tolist()
                    assert [info["time"] for info in chunk.infos[1:]] == times[1:].tolist()
            check_books(sampler)
        totals = sampler.totals
        assert totals.env_failures > 5
        assert totals.env_rebuilds >= totals.env_failures - 4
        assert set(totals.discarded) <= {"env_exception", "env_bad_data", "env_crash", "env_neighbour"}
        running = [view.episode_id for view in sampler.running_episodes()]
        assert {episode for episode, chunk in last.items() if chunk.end is ChunkEnd.ONGOING} <= set(running)
    if watched:
        told = account.over + running
        assert len(set(told)) == len(told)
        assert set(told) <= set(account.created)
        assert len(account.created) - len(told) <= 4  # at most one in each lane waits for its reset in the background
        assert account.failed >= totals.env_failures


def test_a_partly_delivered_episode_ends_with_a_marker_and_the_reason() -> None:
    config = {"lane": 0, "faults": {"step": "exits"}}
    with runner(env_config=config, num_envs=1, rollout_fragment_length=2) as sampler:
        chunks = [chunk for _ in range(8) for chunk in sampler.sample_fragment()]
    aborted = [chunk for chunk in chunks if chunk.end is ChunkEnd.ABORTED]
    assert [(chunk.end_reason, len(chunk)) for chunk in aborted] == [("env_crash", 0)]
    assert sampler.totals.env_failures == 1


@pytest.mark.parametrize("again", ["raises", "exits"])
def test_sampling_raises_when_an_env_cannot_be_rebuilt_within_its_budget(again: str) -> None:
    config = {"lane": 0, "faults": {"step": "raises"}, "again": {"construction": again}}
    with runner(env_config=config, num_envs=1, env_restart_attempts=3) as sampler:
        with pytest.raises(EnvRestartBudgetError, match=r"(?s)env 0 failed 4 times .*env_restart_attempts"):
            sampler.sample(num_timesteps=100)
        check_books(sampler)


def test_without_restarts_sampling_raises_the_error_of_the_env() -> None:
    config = {"lane": 0, "faults": {"step": "hangs"}}
    settings = {"env_step_timeout_s": 2.0, "restart_failed_sub_environments": False}
    with runner(env_config=config, **settings) as sampler, pytest.raises(EnvHangError, match="in _hangs"):
        sampler.sample(num_timesteps=100)


def test_on_poll_is_called_while_envs_are_slow_and_may_raise() -> None:
    class Enough(Exception):
        pass

    waits = 0

    def stop() -> None:
        nonlocal waits
        waits += 1
        if waits == 5:
            raise Enough

    with runner("support.envs.troubled:Slow", env_config={"step_s": 0.3}, rollout_fragment_length=3) as sampler:
        with pytest.raises(Enough):
            sampler.sample_fragment(stop)
        check_books(sampler)
        chunks = sampler.sample(num_timesteps=6)
        assert all(len(chunk.obs) == len(chunk) + 1 for chunk in chunks)
        assert sum(len(chunk) for chunk in chunks) > 0
        check_books(sampler)


def test_make_env_starts_new_processes_and_stop_leaves_none() -> None:
    sampler = runner("CartPole-v1")
    first = pids(sampler)
    sampler.sample(num_timesteps=10)
    sampler.make_env()
    second = pids(sampler)
    assert not set(first) & set(second)
    assert sum(len(chunk) for chunk in sampler.sample(num_timesteps=12)) == 12
    sampler.stop()
    assert not any(is_running(pid) for pid in first + second)


def test_a_runner_that_is_dropped_without_stop_takes_its_processes_with_it() -> None:
    sampler = runner("CartPole-v1")
    sampler.sample(num_timesteps=10)
    left = pids(sampler)
    del sampler  # it is in a cycle
    with pytest.warns(ResourceWarning, match=r"processes of envs were dropped without stop"):
        gc.collect()
    wait_until(lambda: not any(is_running(pid) for pid in left), "the end of the processes")
    wait_until(lambda: "env-output" not in {t.name for t in threading.enumerate()}, "the end of the drain")


def test_an_env_in_another_process_shows_its_spaces_and_refuses_step() -> None:
    told: list[Any] = []
    functions: dict[str, Callable[..., Any]] = {"on_environment_created": lambda env: told.append(env)}
    with runner("CartPole-v1", num_envs=2, callbacks=[functions]) as sampler:
        assert [env.action_space for env in told] == [gym.spaces.Discrete(2)] * 2
        with pytest.raises(EnvError, match="env 1 lives in another process"):
            told[1].step(0)
        assert sampler.env is told[0]


def test_placements_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"env_placement = 'process' is for .*gym_env_vectorize_mode"):
        EnvRunnerConfig(env_placement="process", gym_env_vectorize_mode="sync")
    with pytest.raises(ConfigError):
        MultiAgentEnvRunner(EnvRunnerConfig(env="support.envs.toy_agents:Nothing", env_placement="process"))


@pytest.mark.parametrize(
    "space",
    [
        gym.spaces.Box(np.array([-1.0, -np.inf], np.float32), np.array([0.1, 2.0], np.float32)),
        gym.spaces.Box(0, 255, (2, 3), np.uint8),
        gym.spaces.Discrete(5, start=-2),
        gym.spaces.Discrete(5, dtype=np.int8),
        gym.spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[0, 1], [2, 3]]),
        gym.spaces.MultiBinary(3),
        gym.spaces.MultiBinary((2, 2)),
        gym.spaces.Dict({"a": gym.spaces.Tuple([gym.spaces.Discrete(2), gym.spaces.Box(-1, 1, (1,), np.float64)])}),
    ],
)
def test_gymnasium_spaces_convert_to_headrace_spaces_and_back(space: gym.Space[Any]) -> None:
    assert to_gym(convert(space, "space")) == space
