"""The watch over calls of the user's code."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.schemas.accounts.recorder import Recorder, read_recorder
from headrace.schemas.accounts.recorder_file import WatchedCall, read_call, read_pulse, seconds_of_silence
from headrace.schemas.accounts.user_calls import UserCall
from headrace.schemas.settings.sampling_settings import SamplingSettings
from headrace.workers.fleet.call_watch import CallWatch

LIMITS_S = SamplingSettings(env_step_timeout_s=60.0, env_reset_timeout_s=300.0).call_limits()


class Watched:
    """A watch without its thread, at a time that the test sets."""

    def __init__(self, path: Path) -> None:
        self.now = 1000.0
        self.path = path
        self.recorder = Recorder(path, 0, 1)
        self.kept: list[tuple[float | None, str]] = []
        self.watch = CallWatch(
            LIMITS_S, self.recorder, lambda *kept: self.kept.append(kept), lambda: self.now, starts=False
        )

    def at(self, now: float) -> WatchedCall:
        self.now = now
        self.watch.look()
        return read_call(self.path)

    def mark(self, kind: UserCall, lane: int) -> None:
        self.recorder.call[0], self.recorder.call[1] = kind, lane


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    watched = Watched(tmp_path / "worker-0-1.rec")
    yield watched
    watched.watch.stop()
    watched.recorder.close()


def test_a_call_has_signs_of_life_until_its_own_limit_and_is_overdue_then(watched: Watched) -> None:
    watched.mark(UserCall.RESET, 3)
    assert not watched.at(1000.0).is_overdue
    assert not watched.at(1299.0).is_overdue
    assert [silence_s for silence_s, _ in watched.kept] == [0.0, 299.0]
    assert watched.kept[-1][1] == "env 3 has been in reset for 299 s (env_reset_timeout_s = 300)"
    assert watched.at(1303.0).is_overdue
    assert len(watched.kept) == 2, "no heartbeat for a call that hangs"


def test_a_wait_for_envs_elsewhere_keeps_the_silence_that_the_sampling_thread_notes(watched: Watched) -> None:
    watched.mark(UserCall.OTHER, 0)
    for second in range(30):  # an update of the recorder every 20 ms
        watched.recorder.touch()
        watched.at(1000.0 + second)
    assert {silence_s for silence_s, _ in watched.kept} == {None}


def test_no_env_is_silent_in_a_call_of_a_policy(watched: Watched) -> None:
    watched.mark(UserCall.RESET, 3)
    watched.at(1000.0)
    watched.at(1200.0)
    watched.mark(UserCall.OTHER, 3)
    watched.at(1200.25)
    watched.at(1201.5)
    assert [silence_s for silence_s, _ in watched.kept] == [0.0, 200.0, None, 0.0]


def test_a_vector_whose_processes_are_killed_at_the_limit_has_time_to_say_so(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    watched.mark(UserCall.STEP, -1)
    watched.at(1000.0)
    assert not watched.at(1061.0).is_overdue
    watched.mark(UserCall.OTHER, -1)
    watched.at(1062.5)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("moves_on", ["another env", "another poll"])
def test_each_call_has_its_limit_for_itself(watched: Watched, moves_on: str) -> None:
    watched.mark(UserCall.STEP, 0)
    for number, now in enumerate((1000.0, 1050.0, 1100.0, 1150.0)):
        if moves_on == "another env":
            watched.mark(UserCall.STEP, number)
        else:
            watched.recorder.touch()
        assert not watched.at(now).is_overdue


def test_all_envs_of_a_vector_have_the_limit_each(watched: Watched) -> None:
    watched.mark(UserCall.STEP, -16)
    watched.at(1000.0)
    assert not watched.at(1000.0 + 16 * 60.0).is_overdue
    assert watched.at(1003.0 + 16 * 60.0).is_overdue


def test_envs_in_processes_that_are_built_have_their_own_deadlines(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    watched.mark(UserCall.PROCESSES, 0)
    for now in (1000.0, 1012.0, 1000.0 + 6 * 3600.0):
        assert not watched.at(now).is_overdue
    assert caplog.messages[0] == "envs in processes have been in construction for 12 s"


def test_code_of_headrace_gets_no_signs_of_life(watched: Watched) -> None:
    watched.mark(UserCall.NONE, 0)
    assert watched.at(1000.0).beat_ns == 0
    assert watched.kept == []


def test_a_slow_call_is_named_in_the_log_and_a_hang_too(watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    watched.mark(UserCall.STEP, 3)
    with caplog.at_level(logging.WARNING):
        for second in range(70):
            watched.at(1000.0 + second)
    assert [record.getMessage() for record in caplog.records] == [
        "env 3 has been in step for 10 s (env_step_timeout_s = 60)",
        "env 3 has been in step for 20 s (env_step_timeout_s = 60)",
        "env 3 has been in step for 40 s (env_step_timeout_s = 60)",
        "env 3 has been in step for 63 s (env_step_timeout_s = 60): it hangs, and this worker counts as lost",
    ]


def test_a_recorder_without_these_words_has_no_call(watched: Watched) -> None:
    watched.mark(UserCall.STEP, 3)
    before = watched.path.read_bytes()[: -8 * 16]
    old = watched.path.with_name("worker-1-1.rec")
    old.write_bytes(before)
    reading, pulse = read_recorder(old), read_pulse(old)
    assert reading is not None
    assert pulse is not None
    assert reading.watched == pulse.watched == WatchedCall()
    now_ns = pulse.updated_ns + 10**9
    assert seconds_of_silence(pulse.updated_ns, pulse.silent_until_ns, pulse.watched, now_ns) == (1.0, 0.0)
