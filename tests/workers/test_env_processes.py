"""Env processes without faults: the same results as inline envs, no wait for slow envs, and no process left over."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.envs.classic_control import CartPoleEnv

from headrace.schemas.errors import ConfigError, EnvContractError, UnknownEnvError
from headrace.workers import EnvContext, EnvRunnerConfig, register_env
from headrace.workers.envs.process.channel import tie_group
from headrace.workers.envs.process.job_settings import name_env
from headrace.workers.envs.process.pool import EnvProcessPool
from support.envs.troubled import Gate, Troubled
from support.runners.call_rate import IDLE, calls_a_second
from support.runners.closing import close_within
from support.runners.process_driver import POLL_S, Driver, is_running, live_inline
from support.waiting import wait_until

pytestmark = pytest.mark.processes


def configure(env: Any = "support.envs.troubled:Troubled", **settings: Any) -> EnvRunnerConfig:
    return EnvRunnerConfig(env=env, **{"num_envs": 3, "envs_per_process": 2, **settings})


@pytest.mark.one_in(2)
@pytest.mark.parametrize("armed", [False, True])
@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_envs_in_processes_give_the_results_of_inline_envs(env: str, armed: bool) -> None:
    """Results are bit-identical, whether an env's process resets it or the driver orders the reset."""
    config = configure(env)
    with EnvProcessPool(config) as pool:
        driver = Driver(pool, armed=armed)
        driver.run(lambda: min(len(driver.lives[lane]) for lane in range(3)) > 420)
    for lane, life in driver.lives.items():
        assert life == live_inline(config, lane, len(life))


def test_nested_observations_and_actions_pass_through() -> None:
    config = configure("support.envs.troubled:Nested", num_envs=2)
    with EnvProcessPool(config) as pool:
        pool.reset(0, 5)
        pool.reset(1, 6)
        assert _gather(pool, "began", 2) == {0, 1}
        pool.begin([0, 1])
        assert pool.observations["obs/seed"].tolist() == [5, 6]
        given = {"actions/gear": np.array([1, 2]), "actions/push/0": np.array([[0.5, 0.25], [1.0, -1.0]], np.float32)}
        pool.step_async(None, given)
        _gather(pool, "stepped", 2)
        assert pool.observations["obs/echo/0"].tolist() == [[0.5, 0.25], [1.0, -1.0]]
        assert pool.rewards.tolist() == [1.0, 2.0]


def _gather(pool: EnvProcessPool, what: str, count: int) -> set[int]:
    found: list[Any] = []
    while len(found) < count:
        answers = pool.step_wait(POLL_S)
        assert answers, "no env answers"
        assert not answers.failures
        found += getattr(answers, what)
    return {item if isinstance(item, int) else item[0] for item in found}


def test_ready_envs_do_not_wait_for_a_slow_env(tmp_path: Path) -> None:
    gate, env_config = Gate(tmp_path), {"lane": 0, "gate": str(tmp_path)}
    with EnvProcessPool(configure("support.envs.troubled:Gated", env_config=env_config, envs_per_process=1)) as pool:
        driver = Driver(pool)
        driver.run(lambda: gate.reached and min(len(driver.lives[lane]) for lane in (1, 2)) > 20)
        assert len(driver.lives[0]) == 1, "its reset"
        gate.open()
        driver.run(lambda: len(driver.lives[0]) > 1)


def test_after_the_first_answer_a_poll_waits_batch_wait_s_for_more() -> None:
    for wait_s, together in ((0.0, 1), (20.0, 2)):
        env_config = {"lane": 0, "step_s": 0.5}
        settings = {"num_envs": 2, "envs_per_process": 1}
        with EnvProcessPool(configure("support.envs.troubled:Slow", env_config=env_config, **settings)) as pool:
            for lane in (0, 1):
                pool.reset(lane, lane)
            _gather(pool, "began", 2)
            pool.step_async(None, pool.actions)
            assert len(pool.step_wait(POLL_S, batch_wait_s=wait_s).stepped) == together


def test_a_poll_returns_at_once_without_orders_and_in_time_with_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    close_within(monkeypatch, 0.3)
    settings = {"env_config": {"step_s": 60.0}, "num_envs": 1}
    with EnvProcessPool(configure("support.envs.troubled:Slow", **settings)) as pool:
        assert not pool.step_wait()
        pool.reset(0, 0)
        _gather(pool, "began", 1)
        pool.step_async([0], pool.actions)
        assert not pool.step_wait(0.05)
        assert not pool.step_wait(0.0)


def test_a_driver_that_waits_for_env_processes_does_not_spin() -> None:
    with EnvProcessPool(
        configure("support.envs.troubled:Slow", env_config={"step_s": 0.2}, envs_per_process=1)
    ) as pool:
        driver = Driver(pool)
        assert calls_a_second(lambda: driver.run(lambda: len(driver.lives[0]) == 12)) < IDLE


def test_a_process_at_its_episode_limit_is_replaced_without_a_loss() -> None:
    config = configure(env_process_max_episodes=6)
    with EnvProcessPool(config) as pool:
        first = set(pool.pids)
        driver = Driver(pool)
        driver.run(lambda: min(driver.episodes[lane] for lane in range(3)) > 20)
        assert not first & set(pool.pids)
        assert len(pool.pids) <= 4
    assert not driver.failures
    for lane, life in driver.lives.items():
        assert life == live_inline(config, lane, len(life))


def test_a_process_above_its_memory_cap_is_replaced_without_a_loss() -> None:
    """The leak is slow enough that its episodes end before memory is a quarter above the cap."""
    config = configure(env_config={"lane": 1, "faults": {"step": "leaks"}}, env_process_max_rss_mb=700, num_envs=2)
    with EnvProcessPool(config) as pool:
        (first,) = pool.pids
        driver = Driver(pool)
        driver.run(lambda: first not in pool.pids)
    assert not driver.failures
    for lane, life in driver.lives.items():
        assert life == live_inline(config.model_copy(update={"env_config": {}}), lane, len(life))


def test_spaces_that_differ_are_an_error() -> None:
    with pytest.raises(EnvContractError, match=r"spaces of env \d should be those of env \d"):
        EnvProcessPool(configure("support.envs.troubled:OtherSpace"))


def test_an_unknown_env_id_raises() -> None:
    with pytest.raises(UnknownEnvError, match="NoSuchEnv-v0"):
        EnvProcessPool(configure("NoSuchEnv-v0"))


def test_name_env_gives_the_id_or_import_path_of_an_env() -> None:
    register_env("by another name", Troubled)
    assert name_env("by another name") == name_env(Troubled) == "support.envs.troubled:Troubled"
    assert name_env("CartPole-v1") == "CartPole-v1"
    assert name_env(CartPoleEnv) == "gymnasium.envs.classic_control.cartpole:CartPoleEnv"


class Inner:
    """Its class attribute is found, an attribute of an object is not."""

    def make(self, context: EnvContext) -> Troubled:
        return Troubled(context)


@pytest.mark.parametrize("env", [lambda context: Troubled(context), Inner().make])
def test_an_env_without_an_import_path_raises_with_advice(env: Any) -> None:
    with pytest.raises(ConfigError, match=r"env: .* cannot be named to another process: .*package.module:make_env"):
        EnvProcessPool(configure(env))


@pytest.mark.parametrize("value", [object(), np.nan, np.array([np.inf])], ids=["object", "nan", "array"])
def test_an_env_config_that_is_no_json_is_a_typed_error(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"env_config: .* as JSON .*plain values"):
        EnvProcessPool(configure(env_config={"made": value}))


def test_the_env_context_has_worker_index_env_index_and_config() -> None:
    config = configure("support.envs.troubled:Telling", num_workers=7, num_envs=3, env_config={"port": 5})
    with EnvProcessPool(config, worker_index=4) as pool:
        for lane in range(3):
            pool.reset(lane, 0)
        _gather(pool, "began", 3)
        pool.begin([0, 1, 2])
        assert pool.observations["obs"].tolist() == [[4, 7, lane, 0, 5] for lane in range(3)]


@pytest.mark.parametrize("module", ["envs.process.child", "agents.packed_env"])
def test_processes_do_not_load_torch(module: str) -> None:
    script = f"import sys, headrace.workers.{module}; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "False\n"


def test_env_processes_and_their_children_die_with_the_parent(tmp_path: Path) -> None:
    """The parent gets SIGKILL while an env holds the interpreter lock for ever."""
    script = f"""
        import signal, sys
        from headrace.workers import EnvRunnerConfig
        from headrace.workers.envs.process.pool import EnvProcessPool
        faults = {{"reset": "leaves a child", "step": "hangs with the lock"}}
        env_config = {{"lane": 0, "faults": faults, "pids": {str(tmp_path / "pids")!r}}}
        pool = EnvProcessPool(EnvRunnerConfig(env="support.envs.troubled:Troubled", env_config=env_config))
        pool.reset(0, 0)
        assert pool.step_wait().began
        for _ in range(5):
            pool.step_async([0], pool.actions)
            pool.step_wait(0.1)
        print(*pool.pids, flush=True)
        signal.pause()
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        pids += [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        assert all(is_running(pid) for pid in pids)
        parent.send_signal(signal.SIGKILL)
    wait_until(lambda: not any(is_running(pid) for pid in pids), what="the end of all")


def test_a_process_paused_by_sigstop_dies_with_its_parent() -> None:
    lifeline, ours = os.pipe()
    process = subprocess.Popen(["sleep", "1000"], pass_fds=[lifeline], start_new_session=True)
    try:
        tie_group(lifeline, process.pid)
        os.close(lifeline)
        process.send_signal(signal.SIGSTOP)
        os.close(ours)
        assert process.wait(POLL_S) == -signal.SIGKILL
    finally:
        process.kill()
        process.wait()


def test_close_may_be_called_twice_and_during_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    close_within(monkeypatch, 0.3)
    pool = EnvProcessPool(configure("support.envs.troubled:Slow", env_config={"step_s": 60.0}))
    pids = pool.pids
    pidfds = [os.pidfd_open(pid) for pid in pids]
    pool.reset(0, 0)
    _gather(pool, "began", 1)
    pool.step_async([0], pool.actions)
    pool.close()
    pool.close()
    for pidfd in pidfds:
        assert select.select([pidfd], [], [], 0)[0]
        os.close(pidfd)
