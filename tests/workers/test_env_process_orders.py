"""Orders and answers between a driver and its env processes: orders queue, answers wake the driver, none is lost."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.schemas.errors import ModuleError
from headrace.workers import EnvRunnerConfig, SingleAgentEnvRunner
from headrace.workers.envs.process.control import SLOTS
from headrace.workers.envs.process.pool import EnvProcessPool
from headrace.workers.envs.process.wakeup_latch import WakeupLatch, count_down
from support.runners.process_driver import POLL_S
from support.waiting import wait_until

pytestmark = pytest.mark.processes


@pytest.fixture
def latch() -> Iterator[WakeupLatch]:
    made = WakeupLatch()
    yield made
    made.close()


def rings(latch: WakeupLatch) -> bool:
    return bool(select.select([latch.bell], [], [], 0)[0])


def test_the_latch_rings_at_the_last_expected_reply(latch: WakeupLatch) -> None:
    latch.arm(3)
    for rung in (False, False, True):
        count_down(latch.tokens, latch.bell)
        assert rings(latch) is rung


def test_a_disarmed_latch_rings_for_every_reply(latch: WakeupLatch) -> None:
    """This holds for any number of earlier replies."""
    for came in range(4):
        latch.arm(3)
        for _ in range(came):
            count_down(latch.tokens, latch.bell)
        latch.disarm()
        assert not rings(latch)
        count_down(latch.tokens, latch.bell)
        assert rings(latch)
        latch.disarm()


def test_replies_add_up_until_the_latch_is_disarmed(latch: WakeupLatch) -> None:
    """This happens when a signal handler raises while the driver sleeps."""
    latch.arm(3)
    latch.arm(2)
    latch.disarm()
    count_down(latch.tokens, latch.bell)
    assert rings(latch)


def test_answers_arrive_after_a_poll_that_a_signal_interrupted() -> None:
    def raises(*_: Any) -> None:
        raise InterruptedError("a signal")

    before = signal.signal(signal.SIGALRM, raises)
    with pool_of("Slow", 2, 1, step_s=0.3) as pool:
        pool.step_async(None, pool.actions)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(InterruptedError):
            pool.step_wait(POLL_S, batch_wait_s=POLL_S)
        assert sorted(pool.step_wait(POLL_S, batch_wait_s=POLL_S).stepped) == [0, 1]
    signal.signal(signal.SIGALRM, before)


def pool_of(env: str, num_envs: int, in_process: int, **env_config: float) -> EnvProcessPool:
    config = EnvRunnerConfig(env=f"support.envs.troubled:{env}", num_envs=num_envs, envs_per_process=in_process)
    pool = EnvProcessPool(config.model_copy(update={"env_config": env_config}))
    for lane in range(num_envs):
        pool.reset(lane, lane)
    began: list[int] = []
    while len(began) < num_envs:
        began += [lane for lane, _ in pool.step_wait(POLL_S).began]
    pool.begin(range(num_envs))
    return pool


def test_a_process_starts_its_next_order_while_the_driver_does_not_poll() -> None:
    with pool_of("Slow", 2, 2, step_s=0.1) as pool:
        before = pool.observations["obs"].copy()
        pool.step_async([0], pool.actions)
        pool.step_async([1], pool.actions)
        wait_until(lambda: (pool.observations["obs"] != before).all(), what="both steps, though nobody listens")
        assert pool.step_wait(POLL_S, batch_wait_s=POLL_S).stepped == [0, 1]


def test_orders_that_exceed_the_slots_wait_and_none_is_lost() -> None:
    lanes = 2 * SLOTS + 1
    with pool_of("Slow", lanes, lanes, step_s=0.02, lane=0) as pool:
        for lane in range(lanes):
            pool.step_async([lane], pool.actions)
        stepped: list[int] = []
        while len(stepped) < lanes:
            stepped += pool.step_wait(POLL_S).stepped
    assert sorted(stepped) == list(range(lanes))


def test_a_poll_with_a_batch_wait_waits_for_all_envs_and_one_without_for_any() -> None:
    with pool_of("Slow", 3, 1, step_s=0.3, lane=1) as pool:
        pool.step_async(None, pool.actions)
        assert sorted(pool.step_wait(POLL_S, batch_wait_s=POLL_S).stepped) == [0, 1, 2]
        pool.step_async(None, pool.actions)
        assert 1 not in pool.step_wait(POLL_S).stepped


def test_a_poll_for_all_envs_does_not_hang_when_a_process_is_killed() -> None:
    with pool_of("Slow", 3, 1, step_s=0.3, lane=1) as pool:
        pool.step_async(None, pool.actions)
        os.kill(pool.pids[2], 9)
        stepped, failed = list[int](), list[int]()
        while not {0, 1} <= set(stepped) or 2 not in stepped + failed:
            answers = pool.step_wait(POLL_S, batch_wait_s=POLL_S)
            stepped += answers.stepped
            failed += [failure.lane for failure in answers.failures]
    assert sorted(stepped) in ([0, 1], [0, 1, 2])
    assert failed in ([], [2])  # it may have answered, and be told of as lost afterwards


def test_infos_of_any_length_arrive_with_their_step() -> None:
    with pool_of("Wordy", 2, 2) as pool:
        for length in (0, 1, 2, 1, 2):
            pool.step_async(None, {"actions": np.array([length, 1])})
            infos = dict(pool.step_wait(POLL_S, batch_wait_s=POLL_S).infos)
            assert infos[1] == {"said": "so"}
            assert infos.get(0) == ({"said": "so" * length**20} if length else None)


def test_a_runner_whose_policy_cannot_be_built_leaves_no_process() -> None:
    config = EnvRunnerConfig(env="CartPole-v1", env_placement="process", module="json:JSONDecoder")
    before = children()
    with pytest.raises(ModuleError):
        SingleAgentEnvRunner(config)
    assert children() <= before


def children() -> set[int]:
    listed = (task.read_text().split() for task in Path("/proc/self/task").glob("*/children"))
    return {int(pid) for pids in listed for pid in pids}
