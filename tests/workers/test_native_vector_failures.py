"""A native vector fails as a whole: the runner rebuilds it, aborts open episodes, and keeps finished ones."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.errors import EnvContractError, EnvRestartBudgetError
from headrace.workers import EnvContext, StepFailedRecreateEnv
from headrace.workers.envs import restarts
from support.envs.native_vectors import vector_of
from support.envs.toy import Counting, check_books, runner
from support.runners.closing import close_within
from support.waiting import wait_until

# Gymnasium's AsyncVectorEnv tells of an env's error by warnings too, before it raises it.
pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore:.*ERROR:UserWarning")]

MODES = list(AutoresetMode)


def test_a_runner_that_is_dropped_without_stop_takes_the_processes_of_its_vector_with_it() -> None:
    others = set(threading.enumerate())
    sampler = runner(Counting, num_envs=2, gym_env_vectorize_mode="async")
    sampler.sample(num_timesteps=8)
    left = multiprocessing.active_children()
    assert len(left) == 2
    del sampler  # it is in a cycle
    with pytest.warns(ResourceWarning, match="the processes of a vector were dropped without stop"):
        gc.collect()
    wait_until(lambda: not any(process.is_alive() for process in left), "the end of the processes")
    wait_until(lambda: set(threading.enumerate()) <= others, "the end of the watchdog")


class Once(Counting):
    """Env 1 does `config["fault"]` at step `config["at"]` of its first life that gets there, told by a file."""

    def step(self, action: Any) -> Any:
        answer = super().step(action)
        if self.index == 1 and self.t == self.config["at"] and not Path(self.config["done"]).exists():
            Path(self.config["done"]).touch()
            return self.config["fault"](answer)
        return answer


def _raise(answer: Any) -> Any:
    raise RuntimeError("diverged")


def _bad_reward(answer: Any) -> Any:
    return answer[0], float("nan"), *answer[2:]


def _outside(answer: Any) -> Any:
    return np.array([-np.inf, 0.0], np.float32), *answer[1:]


def _hang(answer: Any) -> Any:
    time.sleep(3600)


def _die(answer: Any) -> Any:
    os._exit(3)


def _kill(answer: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def _faulty(tmp_path: Path, fault: Callable[[Any], Any], at: int = 3) -> dict[str, Any]:
    return {"length": 6, "lengths": {0: 3}, "fault": fault, "at": at, "done": str(tmp_path / "done")}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("fault", "reason"), [(_raise, "env_exception"), (_bad_reward, "env_bad_data"), (_outside, "env_bad_data")]
)
def test_a_failed_vector_aborts_all_open_episodes_with_the_reason(
    tmp_path: Path, mode: AutoresetMode, fault: Callable[[Any], Any], reason: str
) -> None:
    settings = {"num_envs": 3, "env_config": _faulty(tmp_path, fault), "rollout_fragment_length": 2}
    with runner(vector_of(Once, "sync", mode), **settings) as sampler:
        parts = [chunk.episode_id for chunk in sampler.sample_fragment()]
        batch = sampler.sample_fragment()
        check_books(sampler)
        assert sampler.totals.discarded == ({} if fault is _raise else {reason: 2})
        markers = {chunk.episode_id: chunk for chunk in batch if chunk.end is ChunkEnd.ABORTED}
        # Env 0 finished with the very step in which env 1 failed, unless that step came back for nobody.
        finished = [chunk for chunk in batch if chunk.end is ChunkEnd.TERMINATED]
        assert [chunk.env_index for chunk in finished] == ([] if fault is _raise else [0])
        assert set(markers) == set(parts) - {chunk.episode_id for chunk in finished}
        assert {marker.end_reason for marker in markers.values()} == {reason}
        assert sampler.totals.env_failures == sampler.totals.env_rebuilds == 1
        assert sampler.sample(num_episodes=4)
        check_books(sampler)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("fault", "reason"),
    [(_raise, "env_exception"), (_hang, "env_hang"), (_die, "env_exception"), (_kill, "env_exception")],
)
def test_a_vector_of_processes_is_rebuilt_after_any_fault_of_one_process(
    tmp_path: Path, mode: AutoresetMode, fault: Callable[[Any], Any], reason: str
) -> None:
    created: list[Any] = []

    def create(context: EnvContext) -> Any:
        created.append(vector_of(Once, "async", mode)(context))
        return created[-1]

    settings = {"num_envs": 3, "env_config": _faulty(tmp_path, fault, at=4), "rollout_fragment_length": 2}
    with runner(create, env_step_timeout_s=2.0 if fault is _hang else 100.0, **settings) as sampler:
        for _ in range(4):
            batch = sampler.sample_fragment()
            check_books(sampler)
        assert sampler.totals.env_failures == 1
        assert set(sampler.totals.discarded) == {reason}
        assert len(batch) >= 3
        assert len(created) == 2
        assert not any(process.is_alive() for process in created[0].processes)
    assert not any(process.is_alive() for vector in created for process in vector.processes)


def test_a_hanging_env_is_named_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"num_envs": 2, "env_config": _faulty(tmp_path, _hang)}
    with runner(Once, gym_env_vectorize_mode="async", env_step_timeout_s=1.0, **settings) as sampler:
        sampler.sample(num_timesteps=20)
    assert "env 1 did not return from step within env_step_timeout_s = 1 s" in caplog.text


class Sleepy(Counting):
    """Its second reset never ends, told by a file, nor does `close` if the config says so."""

    def reset(self, **settings: Any) -> Any:
        if self.index == 1 and Path(self.config["began"]).exists() and not Path(self.config["done"]).exists():
            Path(self.config["done"]).touch()
            time.sleep(3600)
        Path(self.config["began"]).touch()
        return super().reset(**settings)

    def close(self) -> None:
        if self.index == 1 and self.config.get("close_hangs"):
            time.sleep(3600)


@pytest.mark.parametrize("mode", MODES)
def test_a_hanging_reset_counts_as_one_failure_of_the_vector(tmp_path: Path, mode: AutoresetMode) -> None:
    config = {"length": 4, "lengths": {0: 7}, "began": str(tmp_path / "began"), "done": str(tmp_path / "done")}
    (tmp_path / "done").touch()
    with runner(
        vector_of(Sleepy, "async", mode),
        num_envs=2,
        env_config=config,
        rollout_fragment_length=3,
        env_step_timeout_s=2.0,
        env_reset_timeout_s=2.0,
    ) as sampler:
        sampler.sample_fragment()
        (tmp_path / "done").unlink()
        for _ in range(3):
            sampler.sample_fragment()
            check_books(sampler)
        assert sampler.totals.env_failures == 1
        assert set(sampler.totals.discarded) <= {"env_hang"}


def test_processes_that_do_not_close_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    close_within(monkeypatch, 0.3)
    config = {"began": str(tmp_path / "began"), "done": str(tmp_path), "close_hangs": True}
    with runner(Sleepy, num_envs=2, gym_env_vectorize_mode="async", env_config=config) as sampler:
        sampler.sample(num_timesteps=4)
        vector: Any = sampler.env
    # The thread that is left in `close` waits for them too, and may be the one that hears of their end.
    wait_until(lambda: not any(process.is_alive() for process in vector.processes), "the end of the processes")


class Failing(Counting):
    """Raises `config["error"]` at step 2."""

    def step(self, action: Any) -> Any:
        if self.t == 1:
            raise self.config["error"]
        return super().step(action)


@pytest.mark.parametrize("mode", MODES)
def test_a_vector_that_always_fails_raises_env_restart_budget_error(mode: AutoresetMode) -> None:
    config = {"error": RuntimeError("no more")}
    with runner(vector_of(Failing, "sync", mode), num_envs=2, env_config=config, env_restart_attempts=3) as sampler:
        with pytest.raises(EnvRestartBudgetError, match="failed 4 times") as caught:
            sampler.sample(num_timesteps=100)
        assert str(caught.value.__cause__) == "no more"
        check_books(sampler)
        assert sampler.totals.env_failures == 4


def test_without_restarts_the_runner_raises_the_envs_own_error() -> None:
    with (
        runner(
            Failing,
            num_envs=2,
            gym_env_vectorize_mode="sync",
            env_config={"error": KeyError("mine")},
            restart_failed_sub_environments=False,
        ) as sampler,
        pytest.raises(KeyError, match="mine"),
    ):
        sampler.sample(num_timesteps=100)


def test_an_env_may_ask_for_a_rebuild_without_an_error(caplog: pytest.LogCaptureFixture) -> None:
    config = {"error": StepFailedRecreateEnv("tired")}
    with (
        runner(Failing, gym_env_vectorize_mode="sync", env_config=config, env_restart_attempts=2) as sampler,
        pytest.raises(EnvRestartBudgetError),
    ):
        sampler.sample(num_timesteps=10)
    assert sampler.totals.env_failures == 0
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_the_runner_keeps_polling_while_it_waits_before_a_rebuild(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "BACKOFF_S", 0.05)
    waits: list[int] = []
    settings = {"num_envs": 2, "env_config": {"error": RuntimeError("no")}}
    with runner(Failing, gym_env_vectorize_mode="sync", env_restart_attempts=3, **settings) as sampler:
        with pytest.raises(EnvRestartBudgetError):
            sampler.sample_fragment(on_poll=lambda: waits.append(1))
        assert len(waits) > 4  # more often than there were polls


class Told:
    """Notes what callbacks are told, and raises in the second episode of env 1 at `where`."""

    def __init__(self, where: str) -> None:
        self.where, self.told = where, list[str]()

    def _note(self, event: str, episode: Any) -> None:
        self.told.append(f"{event} {episode.env_index}")
        if event == self.where and self.told.count(f"{event} 1") == 2 and episode.env_index == 1:
            raise ValueError("of the callback")

    def on_episode_created(self, episode: Any) -> None:
        self._note("created", episode)

    def on_episode_start(self, episode: Any) -> None:
        self._note("start", episode)

    def on_episode_end(self, episode: Any) -> None:
        self._note("end", episode)

    def on_episode_aborted(self, episode: Any) -> None:
        self._note("aborted", episode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("where", ["created", "start", "end", "never"])
def test_callbacks_see_every_episode_and_a_callback_error_rebuilds_the_vector(mode: AutoresetMode, where: str) -> None:
    told = Told(where)
    with runner(
        vector_of(Counting, "sync", mode), num_envs=2, env_config={"lengths": {0: 3, 1: 4}}, callbacks=[told]
    ) as sampler:
        sampler.sample(num_timesteps=40)
        check_books(sampler)
        assert set(sampler.totals.discarded) <= {"callback_exception"}
        assert (sampler.totals.env_rebuilds == 1) is (where != "never")
        assert sampler.totals.env_failures == 0
        open_ones = len(sampler.running_episodes())
        counts = {event: sum(line.startswith(event) for line in told.told) for event in ("created", "end", "aborted")}
        assert counts["created"] == counts["end"] + counts["aborted"] + open_ones - (where == "end")


def test_malformed_answers_of_a_vector_raise_env_contract_error() -> None:
    class Odd(gym.vector.SyncVectorEnv):
        answer: Callable[[Any], Any]

        def step(self, actions: Any) -> Any:
            return Odd.answer(super().step(actions))

    def create(context: EnvContext) -> Any:
        return Odd([lambda: Counting(context)] * 2)

    for answer, message in [
        (lambda a: a[:4], "answer of step should be"),
        (lambda a: (a[0], [1.0], *a[2:]), r"Rewards should be 2 real scalars, got float64 \(1,\)"),
        (lambda a: (a[0], a[1], a[2].astype(int), *a[3:]), r"terminated should be bool \(2,\), got int64"),
        (lambda a: (a[0].astype(np.float64), *a[1:]), r"observation should be float32 \(2, 2\), got float64"),
        (lambda a: (*a[:4], []), "info should be a dict"),
    ]:
        Odd.answer = staticmethod(answer)
        with (
            runner(create, num_envs=2, restart_failed_sub_environments=False) as sampler,
            pytest.raises(EnvContractError, match=message),
        ):
            sampler.sample(num_timesteps=4)
