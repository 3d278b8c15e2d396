"""After any fault of an env, envs in other processes give bit-identical results, and the env itself is rebuilt."""

from __future__ import annotations

import gc
import itertools
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.schemas.accounts.ledger import Discard
from headrace.schemas.errors import EnvCrashError, EnvError, EnvHangError
from headrace.workers import EnvRunnerConfig
from headrace.workers.envs.process.pool import EnvProcessPool
from support.envs.fault_table import BAD_DATA, DEATHS, HANGS
from support.runners.closing import close_within
from support.runners.process_driver import Driver, descriptors, is_running, live_inline
from support.waiting import wait_until

pytestmark = pytest.mark.processes

LANES, FAULTY, NEIGHBOUR, ELSEWHERE = 3, 1, 0, 2
ENOUGH = 40
"""Entries in the life of each lane after which a test has seen enough."""


@pytest.fixture(scope="module", autouse=True)
def only_what_is_new_is_looked_through() -> Iterator[None]:
    """A collection goes through all objects, of which there are hundreds of thousands before the first test."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def nothing_stays_open(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    close_within(monkeypatch, 1.0)
    gc.collect()
    before = descriptors()
    yield
    gc.collect()
    assert descriptors() == before


def configure(fault: str, at: str, **settings: Any) -> EnvRunnerConfig:
    env_config = {"faults": {at: fault}, "lane": FAULTY, **settings.pop("env_config", {})}
    settings = {"num_envs": LANES, "envs_per_process": 2, **settings}
    return EnvRunnerConfig(env="support.envs.troubled:Troubled", env_config=env_config, **settings)


def plain() -> EnvRunnerConfig:
    """The same envs without any fault."""
    return EnvRunnerConfig(env="support.envs.troubled:Troubled")


def drive(config: EnvRunnerConfig, *, until_failed: bool = True) -> Driver:
    """Run until every lane has lived long enough, the faulty one after its failure; check those in other processes."""
    with EnvProcessPool(config) as pool:
        driver = Driver(pool)
        driver.run(lambda: min(len(driver.lives[lane]) for lane in range(LANES)) >= ENOUGH)
        pids = pool.pids
    assert not any(is_running(pid) for pid in pids)
    assert bool(driver.failures) == until_failed
    life = driver.lives[ELSEWHERE]
    assert life == live_inline(plain(), ELSEWHERE, len(life))
    assert ELSEWHERE not in {failure.lane for failure in driver.failures}
    return driver


def reasons(driver: Driver) -> dict[int, Discard]:
    return {failure.lane: failure.reason for failure in driver.failures}


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raises", "RuntimeError: diverged"),
        ("calls sys.exit", "SystemExit: 3"),
        *BAD_DATA.items(),
    ],
)
def test_bad_data_or_an_exception_in_a_step_fails_that_env_alone(fault: str, words: str) -> None:
    driver = drive(configure(fault, "step"))
    (failure,) = driver.failures
    is_error = fault in ("raises", "calls sys.exit")
    assert (failure.lane, failure.stepped) == (FAULTY, not is_error)
    assert failure.reason is (Discard.ENV_EXCEPTION if is_error else Discard.ENV_BAD_DATA)
    assert re.search(words, str(failure.error))
    assert driver.lives[NEIGHBOUR] == live_inline(plain(), NEIGHBOUR, len(driver.lives[NEIGHBOUR]))


def test_an_error_from_an_env_process_carries_the_original_traceback() -> None:
    (failure,) = drive(configure("raises", "step")).failures
    assert any("in _raises" in note and "diverged" in note for note in failure.error.__notes__)


def test_an_env_may_ask_to_be_rebuilt() -> None:
    (failure,) = drive(configure("asks", "step")).failures
    assert failure.was_asked_for


def test_a_reset_that_raises_is_a_failure_of_that_env_alone() -> None:
    (failure,) = drive(configure("raises", "reset")).failures
    assert (failure.lane, failure.at) == (FAULTY, "reset")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("at", ["reset", "step"])
@pytest.mark.parametrize("fault", HANGS)
def test_a_hung_call_is_killed_and_the_error_has_its_stack(fault: str, at: str) -> None:
    driver = drive(configure(fault, at, **{f"env_{at}_timeout_s": 1.0}))
    assert reasons(driver) == {FAULTY: Discard.ENV_HANG, NEIGHBOUR: Discard.ENV_NEIGHBOUR}
    (error,) = [failure.error for failure in driver.failures if failure.lane == FAULTY]
    assert isinstance(error, EnvHangError)
    assert f"env 1 did not return from {at} within env_{at}_timeout_s = 1 s" in str(error)
    assert f"in _{fault.replace(' ', '_')}" in error.stack


@pytest.mark.one_in(3)
@pytest.mark.parametrize("at", ["reset", "step"])
@pytest.mark.parametrize(
    ("fault", "last_words"),
    [("segfaults", "in _segfaults"), ("exits", "so long"), ("is killed", ""), ("is signalled", "")],
)
def test_a_crash_is_reported_with_its_cause_and_the_last_output(fault: str, last_words: str, at: str) -> None:
    driver = drive(configure(fault, at))
    assert reasons(driver) == {FAULTY: Discard.ENV_CRASH, NEIGHBOUR: Discard.ENV_NEIGHBOUR}
    (error,) = [failure.error for failure in driver.failures if failure.lane == FAULTY]
    assert isinstance(error, EnvCrashError)
    assert error.cause == DEATHS[fault]
    assert f"ended by {error.cause} in {at}" in str(error)
    assert last_words in str(error)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("raises", Discard.ENV_EXCEPTION),
        ("exits", Discard.ENV_CRASH),
        ("segfaults", Discard.ENV_CRASH),
        ("hangs", Discard.ENV_HANG),
        ("hangs with the lock", Discard.ENV_HANG),
    ],
)
def test_other_envs_continue_while_an_env_cannot_be_rebuilt(fault: str, reason: Discard) -> None:
    config = configure(
        "raises", "step", env_config={"again": {"construction": fault}}, env_reset_timeout_s=2.0, envs_per_process=1
    )
    with EnvProcessPool(config) as pool:
        driver = Driver(pool)
        driver.run(lambda: len(driver.failures) == 2)
        seen = len(driver.lives[ELSEWHERE])
        driver.run(lambda: len(driver.lives[ELSEWHERE]) > seen + ENOUGH)
    assert {failure.lane for failure in driver.failures} == {FAULTY}
    assert (driver.failures[1].reason, driver.failures[1].at) == (reason, "construction")
    for lane in (NEIGHBOUR, ELSEWHERE):
        assert driver.lives[lane] == live_inline(plain(), lane, len(driver.lives[lane]))


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("raises", EnvError, "env 1 .*could not be built: RuntimeError: diverged"),
        ("exits", EnvCrashError, "exit code 7 in construction"),
        (
            "hangs with the lock",
            EnvHangError,
            r"did not return from construction within 2 \* env_reset_timeout_s = 4 s",
        ),
    ],
)
def test_an_env_that_cannot_be_built_at_first_is_a_typed_error(fault: str, kind: type[EnvError], words: str) -> None:
    with pytest.raises(kind, match=words):
        EnvProcessPool(configure(fault, "construction", env_reset_timeout_s=2.0))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("fault", ["raises", "hangs", "hangs with the lock", "exits", "segfaults"])
def test_an_env_that_fails_to_close_blocks_no_rebuild_and_no_shutdown(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds for a rebuild of the env and for the close of the pool."""
    close_within(monkeypatch, 0.5)
    config = configure("raises", "step", env_config={"faults": {"step": "raises", "close": fault}}, num_envs=3)
    driver = drive(config)
    assert driver.failures[0].lane == FAULTY
    assert driver.failures[0].reason is Discard.ENV_EXCEPTION
    assert [failure.lane for failure in driver.failures].count(FAULTY) == 1, "closing is no failure of the next one"
    spared = fault in ("raises", "hangs")
    assert (NEIGHBOUR not in reasons(driver)) is spared

    with EnvProcessPool(configure(fault, "close")) as pool:
        pids = pool.pids
    assert not any(is_running(pid) for pid in pids)


@pytest.mark.thorough
def test_a_process_with_a_leak_is_replaced_at_its_memory_cap() -> None:
    with EnvProcessPool(configure("leaks", "step", env_process_max_rss_mb=150)) as pool:
        first = set(pool.pids)
        driver = Driver(pool)
        driver.run(lambda: len(driver.lives[FAULTY]) > 300)
        assert not first <= set(pool.pids)
    life = driver.lives[ELSEWHERE]
    assert life == live_inline(plain(), ELSEWHERE, len(life))


def test_a_flood_of_output_blocks_no_env() -> None:
    drive(configure("floods", "step"), until_failed=False)


@pytest.mark.parametrize("fault", ["forks", "forks and raises"])
def test_a_process_that_an_env_forks_sends_no_answers(fault: str) -> None:
    driver = drive(configure(fault, "step"), until_failed=False)
    for lane in (FAULTY, NEIGHBOUR):
        assert driver.lives[lane] == live_inline(plain(), lane, len(driver.lives[lane]))


def test_too_few_file_descriptors_raise_a_typed_error_and_leave_none_open() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    in_use = {int(path.name) for path in Path("/proc/self/fd").iterdir()}
    unused = (number for number in itertools.count() if number not in in_use)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next(itertools.islice(unused, 20, None)), limits[1]))
    try:
        with pytest.raises(EnvError, match=r"no process could be started for envs \d+ to .*ulimit -n"):
            EnvProcessPool(configure("raises", "step", num_envs=30, envs_per_process=1))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_child_processes_of_an_env_end_with_its_process(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    drive(configure("leaves a child", "step", env_config={"pids": str(pids)}), until_failed=False)
    left = [int(pid) for pid in pids.read_text().split()]
    assert left
    wait_until(lambda: not any(is_running(pid) for pid in left), what="the end of what the env started")
