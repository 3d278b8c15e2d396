"""`GymVectorEnv` gives what gymnasium's own vector gives, and goes on where an env, its process or its host is lost."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics

from headrace.schemas.errors import (
    ConfigError,
    EnvContractError,
    EnvError,
    EnvRestartBudgetError,
    UnknownEnvError,
)
from headrace.workers import EnvRunnerConfig, GymVectorEnv, VectorEnv
from headrace.workers.adapters import gym_vector_env
from headrace.workers.envs import restarts
from support.envs.counting import Counted
from support.envs.native_vectors import vector_of
from support.envs.walks import SpaceWalk
from support.fleets.env_hosts import EnvHosts

pytestmark = pytest.mark.processes

SAME_STEP, NEXT_STEP = AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP
ELSEWHERE = {"env_placement": "process", "envs_per_process": 1}
Make = Callable[..., GymVectorEnv]
modes = pytest.mark.parametrize("mode", [SAME_STEP, NEXT_STEP])


@pytest.fixture
def ours() -> Iterator[Make]:
    """What makes a vector of walks, and closes it after the test."""
    made: list[GymVectorEnv] = []

    def make(mode: AutoresetMode = SAME_STEP, num_envs: int = 3, walk: Any = None, **settings: Any) -> GymVectorEnv:
        settings = {"env": "support.envs.walks:SpaceWalk", "env_config": walk or {}, **settings}
        made.append(GymVectorEnv(EnvRunnerConfig(num_envs=num_envs, **settings), autoreset_mode=mode))
        return made[-1]

    yield make
    for envs in made:
        envs.close()


def gymnasiums(mode: AutoresetMode = SAME_STEP, num_envs: int = 3, walk: Any = None) -> SyncVectorEnv:
    return SyncVectorEnv([lambda: SpaceWalk(walk or {})] * num_envs, autoreset_mode=mode)


def step_on(envs: GymVectorEnv) -> None:
    for _ in range(10):
        envs.step(np.zeros(3, np.int64))


def check_same(seen: Any, due: Any) -> None:
    """Arrays of the same values, dtypes and nesting. Numbers of a process, such as its pid, are left out."""
    assert type(seen) is type(due)
    if isinstance(due, dict):
        assert seen.keys() == due.keys()
        for key in seen.keys() - {"pid"}:
            check_same(seen[key], due[key])
    elif isinstance(due, tuple) or (isinstance(due, np.ndarray) and due.dtype == object):
        for mine, theirs in zip(seen, due, strict=True):
            check_same(mine, theirs)
    elif due is not None:
        np.testing.assert_array_equal(seen, due)
        assert np.asarray(seen).dtype == np.asarray(due).dtype


def check_alike(envs: Any, twin: Any, steps: int = 60, seed: int = 7) -> None:
    """The same answers for the same seeds and actions."""
    assert envs.single_observation_space == twin.single_observation_space
    assert envs.observation_space == twin.observation_space
    assert (envs.single_action_space, envs.action_space) == (twin.single_action_space, twin.action_space)
    assert envs.metadata["autoreset_mode"] is twin.metadata["autoreset_mode"]
    twin.action_space.seed(seed)
    check_same(envs.reset(seed=seed), twin.reset(seed=seed))
    for step in range(steps):
        actions = twin.action_space.sample()
        check_same(envs.step(actions), twin.step(actions))
        if step == steps // 2:
            check_same(envs.reset(), twin.reset())
    check_same(envs.reset(seed=[5] * twin.num_envs), twin.reset(seed=[5] * twin.num_envs))
    check_same(envs.step(actions), twin.step(actions))


@pytest.mark.one_in(5)
@modes
@pytest.mark.parametrize("observation", ["Box", "Discrete", "Dict", "Tuple"])
@pytest.mark.parametrize("action", ["Discrete", "Box", "Dict"])
def test_answers_are_those_of_gymnasiums_vector(ours: Make, mode: AutoresetMode, observation: str, action: str) -> None:
    walk = {"observation": observation, "action": action}
    check_alike(ours(mode, walk=walk), gymnasiums(mode, walk=walk))


@modes
@pytest.mark.parametrize("observation", ["Box", "Discrete", "Dict"])
def test_answers_of_envs_in_processes_are_those_of_gymnasiums_vector(
    ours: Make, mode: AutoresetMode, observation: str
) -> None:
    walk = {"observation": observation, "action": "Dict"}
    envs = ours(mode, walk=walk, env_placement="process", envs_per_process=2)
    check_alike(envs, gymnasiums(mode, walk=walk))


@modes
def test_gymnasiums_statistics_of_episodes_work_on_it(ours: Make, mode: AutoresetMode) -> None:
    envs, twin = RecordEpisodeStatistics(ours(mode)), RecordEpisodeStatistics(gymnasiums(mode))
    for vector in (envs, twin):
        vector.reset(seed=3)
    twin.action_space.seed(3)
    for _ in range(100):
        actions = twin.action_space.sample()
        envs.step(actions)
        twin.step(actions)
    assert len(envs.return_queue) > 20
    assert list(envs.return_queue) == list(twin.return_queue)
    assert list(envs.length_queue) == list(twin.length_queue)


def test_a_reset_without_seed_begins_with_that_of_the_config(ours: Make) -> None:
    seen = []
    for seed in (4, 4, 5):
        envs = ours(seed=seed)
        seen.append(envs.reset()[0])
        envs.close()
    np.testing.assert_array_equal(seen[0], seen[1])
    assert (seen[0] != seen[2]).any()


def test_what_a_caller_writes_into_its_arrays_changes_nothing(ours: Make) -> None:
    envs, twin = ours(), gymnasiums()
    check_same(envs.reset(seed=1), twin.reset(seed=1))
    for _ in range(20):
        obs, rewards, *_ = answer = envs.step(np.zeros(3, np.int64))
        check_same(answer, twin.step(np.zeros(3, np.int64)))
        obs[:], rewards[:] = 7.0, 7.0


# -- envs that fail ---------------------------------------------------------------------------------------------------


def ends_of(answer: Any, mode: AutoresetMode, lane: int) -> tuple[Any, Any]:
    """The last observation and the failure of an episode in `lane`, told in `answer`."""
    obs, _, _, _, infos = answer
    if mode is NEXT_STEP:
        return obs[lane], infos["env_failure"][lane]
    assert infos["_final_obs"][lane]
    assert infos["_final_info"][lane]
    return infos["final_obs"][lane], infos["final_info"]["env_failure"][lane]


@modes
def test_a_process_that_is_killed_ends_one_episode_and_no_other_env_knows(ours: Make, mode: AutoresetMode) -> None:
    envs, twin = ours(mode, **ELSEWHERE), gymnasiums(mode)
    (before, infos), _ = envs.reset(seed=11), twin.reset(seed=11)
    twin.action_space.seed(11)
    for step in range(40):
        if step == 10:
            os.kill(int(infos["pid"][1]), signal.SIGKILL)
        actions = twin.action_space.sample()
        answer, due = envs.step(actions), twin.step(actions)
        for mine, theirs in zip(answer[:4], due[:4], strict=True):
            np.testing.assert_array_equal(mine[[0, 2]], theirs[[0, 2]])
        if step < 10:
            check_same(answer, due)
        obs, rewards, terminated, truncated, infos_of_step = answer
        if step == 10:
            assert (rewards[1], terminated[1], truncated[1]) == (0.0, False, True)
            last, failure = ends_of(answer, mode, 1)
            np.testing.assert_array_equal(last, before[1])
            assert failure.startswith("env_crash in env 1 at step ")
            assert "SIGKILL" in failure
        elif step > 10:
            assert "env_failure" not in infos_of_step
        if step == (10 if mode is SAME_STEP else 11):  # a new episode in a new process
            assert infos_of_step["pid"][1] not in (0, infos["pid"][1])
            assert infos_of_step["first"][1] == pytest.approx(obs[1][0])
        before = obs


@modes
@pytest.mark.parametrize(("fault", "words"), [("raises", "RuntimeError: diverged"), ("has no reward", "got nan")])
@pytest.mark.parametrize("settings", [{}, ELSEWHERE], ids=["inline", "process"])
def test_an_env_that_fails_in_a_step_is_rebuilt_and_goes_on(
    ours: Make, mode: AutoresetMode, fault: str, words: str, settings: Any
) -> None:
    envs = ours(mode, walk={"lane": 2, "fault": fault}, **settings)
    before, _ = envs.reset(seed=1)
    truncated = []
    for _ in range(30):
        obs, rewards, *_, infos = answer = envs.step(np.zeros(3, np.int64))
        if "env_failure" in {**infos, **infos.get("final_info", {})}:
            last, failure = ends_of(answer, mode, 2)
            assert words in failure
            np.testing.assert_array_equal(last, before[2])
            assert rewards[2] == 0.0
            truncated.append(answer[3].tolist())
        before = obs
    assert [lanes[2] for lanes in truncated] == [True]


@modes
def test_a_reset_after_a_failure_begins_everywhere_with_the_seeds_given(ours: Make, mode: AutoresetMode) -> None:
    envs, twin = ours(mode, walk={"lane": 2, "fault": "raises"}, **ELSEWHERE), gymnasiums(mode)
    envs.reset(seed=1)
    while not envs.step(np.zeros(3, np.int64))[3][2]:
        pass
    check_alike(envs, twin)


def test_an_env_that_keeps_failing_raises_an_error_that_says_what_to_do(ours: Make) -> None:
    budget = {"env_restart_attempts": 3}
    envs = ours(walk={"lane": 1, "fault": "raises", "again": True, "at": 1}, **budget, **ELSEWHERE)
    envs.reset(seed=1)
    with pytest.raises(EnvRestartBudgetError, match=r"env_restart_attempts") as caught:
        step_on(envs)
    assert "diverged" in str(caught.value)
    with pytest.raises(gym.error.ResetNeeded, match="after an error"):
        envs.step(np.zeros(3, np.int64))
    envs.reset(seed=1)  # it is built once more


def test_steps_between_two_failures_keep_an_env_going(ours: Make) -> None:
    budget = {"env_restart_attempts": 2}
    envs = ours(walk={"lane": 1, "fault": "raises", "again": True, "at": 3}, **budget)
    envs.reset(seed=1)
    failures = [envs.step(np.zeros(3, np.int64))[4].get("final_info", {}).get("env_failure") for _ in range(40)]
    assert sum(failure is not None for failure in failures) > 4


@modes
def test_without_restarts_the_envs_own_error_comes_out_once(ours: Make, mode: AutoresetMode) -> None:
    envs = ours(mode, walk={"lane": 1, "fault": "raises", "at": 1}, restart_failed_sub_environments=False)
    envs.reset(seed=1)
    with pytest.raises(RuntimeError, match="diverged"):
        step_on(envs)
    check_alike(envs, gymnasiums(mode))


def test_a_long_wait_is_told(ours: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(restarts, "BACKOFF_S", 0.3)
    monkeypatch.setattr(gym_vector_env, "_SAY_WAITING_S", 0.05)
    walk = {"lane": 1, "fault": "raises", "again": True, "at": 1}
    envs = ours(walk=walk, env_restart_attempts=2)
    envs.reset(seed=1)
    with caplog.at_level(logging.WARNING, gym_vector_env.__name__), pytest.raises(EnvRestartBudgetError):
        step_on(envs)
    assert "s for envs [1] to be built and reset" in caplog.text


# -- env hosts --------------------------------------------------------------------------------------------------------


def test_envs_on_a_host_go_on_after_the_host_was_killed_and_started_again(ours: Make, tmp_path: Path) -> None:
    with EnvHosts(tmp_path) as hosts:
        named = "support.envs.walks:SpaceWalk"
        first, _ = hosts.start(named, 2), hosts.start(named, 1)
        lease = {**hosts.at, "env_hosts_lease_s": 5.0}
        envs, twin = ours(env_placement="remote", **lease), gymnasiums()
        check_alike(envs, twin)
        check_same(envs.reset(seed=3), twin.reset(seed=3))
        first.kill()
        first.wait()
        hosts.start(named, 2)
        _, _, terminated, truncated, infos = envs.step(np.zeros(3, np.int64))
        told = infos["final_info"]["env_failure"]
        lost = [index for index in range(3) if told[index]]
        assert len(lost) >= 2  # all three where the other host was silent for too long on a busy machine
        assert all(told[index].startswith(f"env_host_lost in env {index}") for index in lost)
        assert truncated[lost].all()
        assert not terminated[lost].any()
        obs, *_ = envs.step(np.zeros(3, np.int64))
        for _ in range(20):
            before, (obs, *_) = obs, envs.step(np.zeros(3, np.int64))
            assert (obs != before).any(axis=1).all()


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "given", "words"),
    [
        ("Discrete", np.zeros(2, np.int64), r"actions should be int64 \(3,\), a row for each env, got int64 \(2,\)"),
        ("Discrete", np.zeros(3, np.float32), r"int64 \(3,\), a row for each env, got float32 \(3,\)"),
        ("Discrete", None, "got object"),
        ("Discrete", [1, [2], 3], "actions should be arrays nested as"),
        ("Box", np.zeros((3, 4), np.float32), r"float32 \(3, 2, 2\), a row for each env, got float32 \(3, 4\)"),
        ("Dict", np.zeros(3), "actions should be arrays nested as"),
        ("Dict", {"way": np.zeros((3, 2), np.int64)}, "actions should be arrays nested as"),
    ],
)
def test_actions_that_do_not_fit_are_refused_before_any_env_steps(
    ours: Make, action: str, given: Any, words: str
) -> None:
    walk = {"action": action}
    envs, twin = ours(walk=walk), gymnasiums(walk=walk)
    check_same(envs.reset(seed=1), twin.reset(seed=1))
    with pytest.raises(EnvContractError, match=words):
        envs.step(given)
    actions = twin.action_space.sample()
    check_same(envs.step(actions), twin.step(actions))


@pytest.mark.parametrize("settings", [{}, ELSEWHERE], ids=["inline", "process"])
def test_an_env_that_cannot_be_built_is_named(ours: Make, settings: Any) -> None:
    with pytest.raises(EnvError, match=r"env \d .* could not be built: .*KeyError: 'Sphere'"):
        ours(walk={"observation": "Sphere"}, **settings)
    with pytest.raises(UnknownEnvError, match="NoSuch-v0"):
        ours(env="NoSuch-v0", **settings)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"gym_env_vectorize_mode": "sync"}, "gym_env_vectorize_mode"),
        ({"env_to_module": ["headrace.workers.connectors:MeanStd"]}, "env_to_module"),
        ({"policies": {"a": None}}, "policies"),
        ({"double_buffering": True, **ELSEWHERE}, "double_buffering"),
        ({"env": vector_of(Counted, "sync", SAME_STEP)}, "env"),
    ],
)
def test_settings_of_runners_are_refused(ours: Make, settings: Any, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ours(**settings)
    assert caught.value.key == key


def test_a_vector_of_the_users_own_is_stepped_too(ours: Make) -> None:
    def make(context: Any) -> VectorEnv:
        return VectorEnv.wrap(lambda index: SpaceWalk({}), num_envs=context.num_envs)

    check_alike(ours(env=make), gymnasiums())


def test_calls_at_the_wrong_time_say_what_is_missing(ours: Make) -> None:
    with pytest.raises(ConfigError):
        GymVectorEnv(EnvRunnerConfig())
    with pytest.raises(ConfigError, match="SAME_STEP or NEXT_STEP"):
        ours(AutoresetMode.DISABLED)
    envs = ours()
    with pytest.raises(gym.error.ResetNeeded, match=r"reset\(\)"):
        envs.step(np.zeros(3, np.int64))
    for seed in (-1, [1, 2], 2**63):
        with pytest.raises(ValueError, match="seed should be 3 numbers"):
            envs.reset(seed=seed)
    with pytest.raises(ValueError, match="no finite number"):
        envs.reset(options={"low": object()})
    envs.close()
    envs.close()
    with pytest.raises(gym.error.ClosedEnvironmentError):
        envs.reset()
