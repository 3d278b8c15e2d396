"""One failing env costs only its own unfinished fragment, and never more attempts than it is allowed."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import defaultdict, deque
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from headrace.schemas.basics.stop_event import stop_event
from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.errors import EnvContractError, EnvError, EnvHangError, EnvRestartBudgetError
from headrace.workers import EnvContext, EnvRunnerConfig, StepFailedRecreateEnv
from headrace.workers.connectors import PreviousActionReward
from headrace.workers.envs import restarts
from headrace.workers.envs.failures import Failure
from headrace.workers.envs.lane import Lane, close_envs
from headrace.workers.envs.lane_table import LaneTable
from headrace.workers.envs.observations import Observations
from headrace.workers.envs.recovery import LaneRecovery
from headrace.workers.envs.restarts import RestartBudget
from headrace.workers.envs.spaces import convert, spaces_of
from headrace.workers.metrics.totals import RunnerTotals
from headrace.workers.modules import actor_critic
from headrace.workers.policy.batch_columns import PolicyColumns
from headrace.workers.randomness.seeds import SeedTree
from support.envs.counting import FromFive
from support.envs.toy import Answer, Counting, Faulty, check_books, diverge, runner, with_fault
from support.runners.closing import close_within
from support.runners.comparing import assert_same


def _lives(sampler: Any, fragments: int) -> dict[int, list[Any]]:
    """All chunks by env."""
    lives = defaultdict(list)
    for _ in range(fragments):
        for chunk in sampler.sample_fragment():
            lives[chunk.env_index].append(chunk)
    return lives


READY = {"env_placement": "process", "envs_per_process": 1, "remote_env_batch_wait_ms": 0.0}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"module": "headrace.workers.modules:lstm_actor_critic"},
        {"env_to_module": [PreviousActionReward]},
        {"env_placement": "process", "envs_per_process": 1},
        READY,
        {**READY, "env_config": {"late_s": 0.2}},
        {**READY, "env_config": {"late_s": 0.2}, "env_to_module": [PreviousActionReward]},
    ],
    ids=str,
)
def test_a_policy_sees_no_value_outside_the_space_while_an_env_is_gone(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    env = f"{FromFive.__module__}:FromFive" if "env_placement" in settings else FromFive
    monkeypatch.setattr(restarts, "BACKOFF_S", 0.01)
    with runner(env, num_envs=3, rollout_fragment_length=16, **settings, env_restart_attempts=100) as sampler:
        deadline = time.monotonic() + 60
        while sampler.totals.env_failures < 2:  # steps of the siblings take no time, so fragments do not count
            assert time.monotonic() < deadline
            sampler.sample_fragment()
        check_books(sampler)


def test_acting_clients_are_checked_against_a_policy_whose_space_has_no_zero() -> None:
    spaces = spaces_of(FromFive())
    module = actor_critic(spaces)
    columns = PolicyColumns.of(module, spaces, spaces, EnvRunnerConfig(env=FromFive), maps=False)
    assert columns.kinds["values"] == (np.dtype(np.float32), ())


@pytest.mark.parametrize("backoff_s", [0.0, 0.004])
def test_siblings_of_failing_envs_are_the_same_to_the_bit(backoff_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "BACKOFF_S", backoff_s)
    faulty = {1, 4, 6}
    settings = {"num_envs": 8, "rollout_fragment_length": 50}
    with runner(Faulty, env_config=with_fault(diverge, faulty=set()), **settings) as sound:
        expected = _lives(sound, 12)
    with runner(
        Faulty, env_config=with_fault(diverge, faulty=faulty, every=7), env_restart_attempts=100, **settings
    ) as sampler:
        lives = _lives(sampler, 12)
        assert sampler.totals.env_failures >= 3
        assert sampler.totals.env_rebuilds >= sampler.totals.env_failures - 3
        assert set(sampler.totals.discarded) == {"env_exception"}
        check_books(sampler)
    for index in set(range(8)) - faulty:
        assert len(lives[index]) == len(expected[index])
        for chunk, other in zip(lives[index], expected[index], strict=True):
            assert_same(chunk, other)


def test_a_fault_ends_its_episode_with_a_marker_only_if_a_part_was_delivered() -> None:
    config = with_fault(diverge, faulty={0}, every=8)
    with runner(Faulty, env_config=config, rollout_fragment_length=5) as sampler:
        (first,) = sampler.sample_fragment()
        batch = sampler.sample_fragment()
    *chunks, marker = batch
    assert (marker.episode_id, marker.chunk_index, len(marker)) == (first.episode_id, 1, 0)
    assert (marker.end, marker.end_reason) == (ChunkEnd.ABORTED, "env_exception")
    assert (marker.episode_return, marker.episode_length) == (first.episode_return, 5)
    assert [len(c) for c in chunks] == [2]
    assert chunks[0].episode_id != first.episode_id
    assert sampler.totals.discarded == {"env_exception": 2}
    assert sampler.totals.stepped == 9


def test_counters_drop_steps_of_a_failed_env_and_keep_finished_episodes() -> None:
    """Counters say what was delivered; an episode that finished in the same call is delivered and counted."""

    def fail_late(answer: Answer) -> Answer:
        raise RuntimeError

    class Late(Counting):
        def step(self, action: Any) -> Any:
            if self.index == 1 and self.t == 3:
                fail_late(super().step(action))
            return super().step(action)

    with runner(Late, num_envs=2, env_config={"length": 4}) as sampler:
        batch = sampler.sample(num_timesteps=10)
        metrics = sampler.get_metrics()
        assert metrics["num_env_steps_sampled"] == sum(len(c) for c in batch) == 5 + 1
        assert metrics["num_episodes"] == 1
        assert metrics["num_env_step_failures_lifetime"] == 1
        check_books(sampler)


def test_rebuilt_env_goes_on_with_its_next_seed() -> None:
    seeds: list[int] = []

    def create(context: EnvContext) -> Faulty:
        env = Faulty(context)
        env.seeds = seeds  # type: ignore[assignment]
        return env

    with runner(create, env_config=with_fault(diverge, faulty={0}, every=9)) as sampler:
        for _ in range(5):
            sampler.sample(num_timesteps=10)
    assert len(seeds) > 5
    assert len(set(seeds)) == len(seeds)


@pytest.mark.parametrize("failing", ["step", "reset", "construction"])
def test_env_that_always_fails_ends_in_a_typed_error_after_its_budget(failing: str) -> None:
    """Retries end after the budget, without recursion. The message names an error that has no arguments."""
    tries = {"construction": 0, "reset": 0, "step": 0}

    class Broken(Counting):
        def __init__(self, context: EnvContext) -> None:
            super().__init__(context)
            self._try("construction", armed=context.recreated)

        def _try(self, what: str, armed: bool = True) -> None:
            tries[what] += 1
            if armed and (what == failing or (what == "step" and failing == "construction")):
                raise RuntimeError

        def reset(self, **kwargs: Any) -> Any:
            self._try("reset")
            return super().reset(**kwargs)

        def step(self, action: Any) -> Any:
            self._try("step")
            return super().step(action)

    with runner(Broken, env_restart_attempts=5) as sampler:
        with pytest.raises(
            EnvRestartBudgetError, match=r"env 0 failed 6 times .*RuntimeError.*env_restart_attempts"
        ) as caught:
            sampler.sample(num_timesteps=10)
        assert isinstance(caught.value.__cause__, RuntimeError)
        assert tries[failing] == 6
        first_steps = {
            "step": 6,
            "reset": 0,
            "construction": 1,
        }  # an episode that fails at once has no step, and counts
        assert list(sampler.totals.aborted) == [(0.0, 0)] * first_steps[failing]
        check_books(sampler)


@pytest.mark.long
def test_thousands_of_failed_restarts_do_not_recurse() -> None:
    class NoReset(Counting):
        def reset(self, **kwargs: Any) -> Any:
            raise RuntimeError("no")

    with (
        runner(NoReset, env_restart_attempts=3000) as sampler,
        pytest.raises(EnvRestartBudgetError),
    ):
        sampler.sample(num_timesteps=1)


def test_deliveries_do_not_lift_the_cap_of_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "PER_WINDOW", 1)
    config = with_fault(diverge, faulty={0}, every=3)
    with runner(Faulty, env_config=config, env_restart_attempts=10, rollout_fragment_length=2) as sampler:
        with pytest.raises(EnvRestartBudgetError, match="env 0 failed 11 times"):
            _lives(sampler, 100)
        assert sampler.totals.env_failures == 11


def test_restart_waits_double_up_to_a_maximum_and_a_delivery_resets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the waits of tests, which are none
    budget = RestartBudget(20, 2**31 - 1, 0)
    error = RuntimeError()
    assert [budget.spend(error, 0.0) for _ in range(10)] == [0.0, *(0.05 * 2**n for n in range(7)), 5.0, 5.0]
    budget.delivered()
    assert budget.spend(error, 0.0) == 0.0


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (RuntimeError("odd"), "or raise env_restart_attempts"),
        (EnvHangError(0, "step", 1.0, "env_step_timeout_s", ""), "or raise env_step_timeout_s"),
        (EnvContractError("observation", "NaN", "free of NaN"), "in the env or in a wrapper"),
    ],
)
def test_the_error_of_an_env_that_is_given_up_ends_with_what_helps(error: Exception, advice: str) -> None:
    with pytest.raises(EnvRestartBudgetError, match=f"; .* {advice}$"):
        RestartBudget(0, 2**31 - 1, 0).spend(error, 0.0)


@pytest.mark.parametrize("is_bad", [True, False])
def test_an_env_whose_attempts_are_used_up_leaves_a_bad_host_and_else_ends_the_worker(is_bad: bool) -> None:
    table = LaneTable(runner(env_restart_attempts=2).config, 0, SeedTree(0, 0, 0, 1), RunnerTotals())
    (lane,), left, rebuilt = table.lanes, [], []

    def leave_host(leaving: Lane, why: str) -> bool:
        left.append((leaving.index, why))
        return is_bad

    recovery = LaneRecovery(table, rebuilt.append, lambda lane: None, leave_host)

    def fail() -> None:
        table.failed.append(Failure(0, RuntimeError("no licence")))
        recovery.revive(None)

    fail()
    fail()
    assert not left
    if is_bad:
        fail()
        assert len(rebuilt) == table.totals.env_rebuilds
        assert lane.budget.in_a_row == 0, "its failures say nothing about the next host"
    else:
        with pytest.raises(EnvRestartBudgetError, match="env_restart_attempts"):
            fail()
    assert left == [(0, "env_exception in env 0 at reset: RuntimeError: no licence")]
    assert table.totals.env_failures == 3


def test_other_envs_sample_and_on_poll_is_called_while_an_env_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "BACKOFF_S", 60.0)

    class Down(Counting):
        def reset(self, **kwargs: Any) -> Any:
            if self.index == 0:
                raise RuntimeError("down")
            return super().reset(**kwargs)

    with runner(Down, num_envs=3, rollout_fragment_length=4) as sampler:
        batch = sampler.sample_fragment()
        assert batch.steps == 8
        assert {c.env_index for c in batch} == {1, 2}

    class Enough(Exception):
        pass

    def stop() -> None:
        raise Enough

    with runner(Down) as sampler, pytest.raises(Enough):
        sampler.sample_fragment(stop)


def test_without_restarts_sampling_raises_the_error_of_the_env() -> None:
    config = with_fault(diverge, faulty={1}, every=6)
    with runner(Faulty, num_envs=2, env_config=config, restart_failed_sub_environments=False) as sampler:
        with pytest.raises(RuntimeError, match="diverged"):
            sampler.sample(num_timesteps=100)
        check_books(sampler)
        assert sampler.totals.open == 6
        batch = sampler.sample(num_timesteps=2)
        assert sum(len(c) for c in batch) == 8
        check_books(sampler)


def test_env_may_ask_to_be_rebuilt_without_an_error_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    def ask(answer: Answer) -> Answer:
        raise StepFailedRecreateEnv

    config = with_fault(ask, faulty={0}, every=6)
    with caplog.at_level(logging.INFO, "headrace"), runner(Faulty, env_config=config) as sampler:
        sampler.sample(num_timesteps=10)
        assert (sampler.totals.env_failures, sampler.totals.env_rebuilds) == (0, 1)
    assert [r.levelname for r in caplog.records] == ["INFO"]


def test_a_failure_is_logged_with_env_step_episode_error_and_attempt(caplog: pytest.LogCaptureFixture) -> None:
    with runner(Faulty, env_config=with_fault(diverge, faulty={0}, every=6)) as sampler:
        (chunk,) = sampler.sample(num_timesteps=3, random_actions=True)
        sampler.sample(num_timesteps=4)
    (record,) = caplog.records
    message = f"env 0 failed at step 6 of episode {chunk.episode_id} (RuntimeError: diverged); 2 steps discarded"
    assert record.getMessage() == f"{message}, rebuilding (attempt 1 of 8)"
    words = "env_exception in env 0 at step 6: RuntimeError: diverged"
    assert sampler.totals.newest_env_failure == words, "views name no id of 32 digits"


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            lambda a: (a[0], float("nan"), *a[2:]),
            r"Reward should be finite scalar, got nan \(<class 'float'>\)\. Actions=",
        ),
        (lambda a: (a[0], 1e308, *a[2:]), r"Reward should be within 3.4e\+38, got 1e\+308"),
        (lambda a: (a[0], np.array([1.0]), *a[2:]), "Reward should be finite scalar"),
        (lambda a: (a[0], 1j, *a[2:]), "Reward should be finite scalar"),
        (lambda a: (a[0], "1", *a[2:]), "Reward should be finite scalar"),
        (lambda a: (a[0], None, *a[2:]), "Reward should be finite scalar"),
        (lambda a: (*a[:4], None), "info should be a dict"),
        (lambda a: (*a[:4], [1]), "info should be a dict"),
        (lambda a: a[:4], "answer of step should be .*got 4 values"),
        (lambda a: None, "answer of step should be"),
        (lambda a: (*a[:2], 1, *a[3:]), "should be bools"),
        (lambda a: (*a[:2], None, *a[3:]), "should be bools"),
        (lambda a: (a[0] * np.float32("nan"), *a[1:]), "observation should be free of NaN"),
        (lambda a: (a[0][:2], *a[1:]), r"observation should be float32 \(3,\), got float32 \(2,\)"),
        (lambda a: (a[0].astype(np.float64), *a[1:]), "observation should be float32"),
        (lambda a: (None, *a[1:]), "observation should be float32"),
    ],
)
def test_bad_data_is_a_failure_of_that_env_only(spoil: Any, words: str, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"num_envs": 3, "rollout_fragment_length": 9}
    with runner(Faulty, env_config=with_fault(spoil, faulty=set()), **settings) as sound:
        expected = _lives(sound, 2)
    with runner(Faulty, env_config=with_fault(spoil, faulty={1}, every=6), **settings) as sampler:
        lives = _lives(sampler, 2)
        assert set(sampler.totals.discarded) == {"env_bad_data"}
        check_books(sampler)
    assert re.search(words, caplog.records[0].getMessage())
    for index in (0, 2):
        for chunk, other in zip(lives[index], expected[index], strict=True):
            assert_same(chunk, other)


def test_a_reset_with_a_bad_observation_is_an_env_failure() -> None:
    class BadReset(Counting):
        resets = 0

        def reset(self, **kwargs: Any) -> Any:
            BadReset.resets += 1
            obs, info = super().reset(**kwargs)
            return (obs, info) if BadReset.resets % 2 == 0 else (obs - np.inf, info)

    with runner(BadReset, env_config={"length": 3}) as sampler:
        assert sum(len(c) for c in sampler.sample(num_timesteps=6)) == 6
        assert sampler.totals.env_failures >= 2
        check_books(sampler)


def test_a_finite_number_is_delivered_however_far_outside_its_box(caplog: pytest.LogCaptureFixture) -> None:
    low, high, totals = np.array([1e308, -np.inf]), np.array([1.1e308, np.inf]), RunnerTotals()
    space = convert(gym.spaces.Box(low, high, dtype=np.float64), "observation")
    seen = Observations(space, 2, note_outside=partial(totals.note_outside, "Far"))
    far = [np.array([-1.7e308, np.inf]), np.array([-1.7e308, 5e-324])]
    for _ in range(2):
        assert seen.put(None, far) == []
    assert seen.columns["obs"].tolist() == [row.tolist() for row in far]
    assert totals.observations_outside == 4
    assert caplog.text.count("its Box ends at") == 1, "named once"
    ((at, _),) = seen.put(None, [far[0], np.array([-np.inf, 0.0])])
    assert at == 1, "an infinity beyond a finite bound is refused"


def test_an_observation_outside_its_box_is_delivered_unless_bounds_are_strict(caplog: pytest.LogCaptureFixture) -> None:
    class Outside(Counting):
        def observe(self) -> Any:
            return super().observe() - 5.0

    with runner(Outside, env_config={"length": 9}) as sampler:
        (chunk,) = sampler.sample(num_timesteps=6)
        assert chunk.obs[:, 0].tolist() == [-5, -4, -3, -2, -1, 0, 1]
        assert (chunk.obs[:, 1] == -5).all()
        assert sampler.totals.observations_outside == 7
    (line,) = (record.getMessage() for record in caplog.records if "its Box ends" in record.getMessage())
    assert "Outside is -5, and its Box ends at 0; delivered as told" in line
    words = "(?s)observation should be within .* where strict_bounds is true, got values from -5.0"
    with runner(Outside, strict_bounds=True, restart_failed_sub_environments=False) as sampler:
        with pytest.raises(EnvContractError, match=words) as caught:
            sampler.sample(num_timesteps=1)
        assert "restart_failed_sub_environments = true rebuilds the env" in caught.value.__notes__[0]
    with (
        runner(Outside, strict_bounds=True, env_restart_attempts=1) as sampler,
        pytest.raises(EnvRestartBudgetError, match=r"give what it should be, in the env or in a wrapper$"),
    ):
        sampler.sample(num_timesteps=1)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.95])
@pytest.mark.parametrize("kind", [None, "sync"])
def test_episodes_that_leave_the_box_are_in_the_mean_of_the_delivered_ones(share: float, kind: Any) -> None:
    lived: list[float] = []

    class Leaves(Counting):
        def reset(self, **kwargs: Any) -> Any:
            answer = super().reset(**kwargs)
            self.leaves, self.earned = self.np_random.random() < share, 0.0
            return answer

        def step(self, action: Any) -> Any:
            observation, _, *end = super().step(action)
            self.earned += -10.0 if self.leaves else 1.0
            if end[0]:
                lived.append(self.earned)
            return observation - 1e3 * self.leaves, -10.0 if self.leaves else 1.0, *end

    with runner(Leaves, num_envs=4, gym_env_vectorize_mode=kind, rollout_fragment_length=50) as sampler:
        for _ in range(3):
            sampler.sample_fragment()
        delivered = [earned for earned, _ in sampler.take_finished_episodes()]
        assert sorted(delivered) == sorted(lived)
        assert len(delivered) == 120
        assert sampler.totals.observations_outside == 5 * delivered.count(-50.0)
        assert abs(delivered.count(-50.0) / 120 - share) < 0.1


def test_close_that_fails_or_hangs_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    close_within(monkeypatch, 0.05)
    released = threading.Event()

    class Sticky(Counting):
        def close(self) -> None:
            if self.index == 0:
                raise RuntimeError("no close")
            released.wait(100)

    sampler = runner(Sticky, num_envs=2)
    sampler.sample(num_timesteps=2)
    sampler.make_env()
    assert sum(len(c) for c in sampler.sample(num_timesteps=4)) == 4
    sampler.stop()
    released.set()
    messages = [r.getMessage() for r in caplog.records]
    assert sum("no close" in m for m in messages) == 2
    assert sum("did not return within 0.05 s" in m for m in messages) == 2


def test_without_memory_for_a_thread_an_env_is_abandoned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    close_envs([Counting()], 1.0)
    assert caplog.messages == ["close-Counting failed (can't start new thread); the env is abandoned"]


class Legacy(Counting):
    """Takes seeds of its own kind: NumPy's legacy generator, an array of C ints, or a C int."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        assert seed is not None
        match self.config["takes"]:
            case "generator":
                np.random.RandomState(seed)
            case "array":
                np.zeros(1, np.int32)[0] = seed
            case "int":
                struct.pack("i", seed)
        return super().reset(seed=seed)


ONLY_NUMPY_2 = pytest.mark.skipif(np.__version__ < "2", reason="numpy 1 puts the lowest bits into the array")


@pytest.mark.parametrize("takes", ["generator", pytest.param("array", marks=ONLY_NUMPY_2), "int"])
def test_an_env_that_takes_no_large_seeds_is_given_up_with_the_setting_that_helps(takes: str) -> None:
    config = {"takes": takes}
    with (
        runner(Legacy, env_config=config, env_restart_attempts=1) as sampler,
        pytest.raises(EnvRestartBudgetError, match="set max_env_seed = 2147483647"),
    ):
        sampler.sample(num_timesteps=10)
    with runner(Legacy, env_config=config, max_env_seed=2**31 - 1) as sampler:
        assert len(sampler.sample(num_timesteps=10)) > 0


class Panic(BaseException):
    """An error as libraries have it that mean to be caught by nobody."""


class Ending(Counting):
    """Env 1 raises `config["kind"]` in the call `config["at"]`. Its first life ends by another error if need be."""

    render_mode = "rgb_array"

    def __init__(self, context: EnvContext) -> None:
        super().__init__(context)
        context["lives"].append(self.index)
        self.life = context["lives"].count(1) if self.index else 0
        self._try("construction", self.life == 2)

    def _try(self, what: str, armed: bool) -> None:
        if armed and what == self.config["at"]:
            raise self.config["kind"](3)

    def reset(self, **kwargs: Any) -> Any:
        self._try("reset", self.life == 2)
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        self._try("step", self.life == 1 and self.t == 3)
        if self.life == 1 and self.t == 3 and self.config["at"] != "render":
            raise RuntimeError("diverged")
        return super().step(action)

    def render(self) -> Any:
        self._try("render", self.life == 1)
        return np.zeros((2, 2, 3), np.uint8)

    def close(self) -> None:
        self._try("close", self.life == 1)


@pytest.mark.parametrize("kind", [SystemExit, GeneratorExit, asyncio.CancelledError, Panic])
@pytest.mark.parametrize(
    ("at", "failures"), [("construction", 2), ("reset", 2), ("step", 1), ("render", 0), ("close", 1)]
)
def test_an_error_that_is_no_exception_costs_that_env_only(kind: type[BaseException], at: str, failures: int) -> None:
    config = {"kind": kind, "at": at, "lives": deque[int]()}  # which is shared, as a list is not
    with runner(Ending, num_envs=2, env_config=config) as sampler:
        sampler.sample(num_timesteps=6)
        assert (sampler.try_render_at(1) is None) == (at == "render")
        sampler.sample(num_timesteps=40)
        assert (sampler.totals.env_failures, sampler.config.env_config["lives"].count(0)) == (failures, 1)
        check_books(sampler)


@pytest.mark.parametrize(
    ("kind", "said"),
    [(SystemExit, r"it called sys\.exit\(3\) instead of raising an exception"), (Panic, "Panic: 3")],
)
def test_a_first_env_that_raises_no_exception_could_not_be_built(kind: type[BaseException], said: str) -> None:
    def build(_: EnvContext) -> Any:
        raise kind(3)

    with pytest.raises(EnvError, match=f"could not be built: {said}; check env"):
        runner(build)


def test_an_interrupt_by_a_signal_is_no_failure_of_the_env_in_which_it_comes() -> None:
    def stop(number: int, frame: object) -> None:
        raise SystemExit(143)

    def kill(answer: Answer) -> Answer:
        signal.raise_signal(numbers.pop())
        return answer

    numbers = [signal.SIGINT, signal.SIGTERM]
    before = signal.signal(signal.SIGTERM, stop)
    try:
        with runner(Faulty, env_config=with_fault(kill, faulty={0}, every=6)) as sampler:
            with pytest.raises(SystemExit):
                sampler.sample(num_timesteps=10)
            with pytest.raises(KeyboardInterrupt):
                sampler.sample(num_timesteps=10)
            assert sampler.totals.env_failures == 0
    finally:
        signal.signal(signal.SIGTERM, before)


def test_where_ctrl_c_sets_an_event_an_env_that_raises_keyboard_interrupt_fails_alone() -> None:
    def interrupt(answer: Answer) -> Answer:
        raise KeyboardInterrupt

    config = with_fault(interrupt, faulty={0}, every=6)
    with stop_event() as stopping, runner(Faulty, env_config=config) as sampler:
        sampler.sample(num_timesteps=10)
        assert sampler.totals.env_failures == 1
        assert not stopping.is_set()


_FORKING = """
import os, sys
from headrace.schemas.basics.stop_event import end_copy, own_process, raise_stop

def leave(how):
    child = os.fork()
    if child == 0:
        try:
            how()
        except BaseException as error:
            raise_stop(error)
        end_copy()
        os._exit(9)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

own_process()
print(leave(lambda: sys.exit(3)), leave(lambda: None))
end_copy()
print("goes on")
"""


def test_a_copy_that_an_env_forks_ends_and_does_not_sample_a_second_time() -> None:
    done = subprocess.run([sys.executable, "-c", _FORKING], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["3 1", "goes on"]
