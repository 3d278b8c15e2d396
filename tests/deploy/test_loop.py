"""The event loop and the stop signals it waits for."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from headrace.deploy.process.event_loop import EventLoop, StandstillWatch
from headrace.deploy.process.stop_signals import StopSignals
from support.waiting import TIMEOUT_S


def test_timers_fire_in_order_and_not_once_cancelled() -> None:
    loop, fired = EventLoop(), []
    loop.call_later(0.02, lambda: fired.append("second"))
    loop.call_later(0.01, lambda: fired.append("first"))
    loop.call_later(0.015, lambda: fired.append("never")).cancel()
    assert loop.turn_until(lambda: len(fired) == 2, TIMEOUT_S)
    assert fired == ["first", "second"]


def test_a_source_forgotten_within_the_same_turn_is_not_called() -> None:
    loop, called = EventLoop(), []
    pipes = [os.pipe(), os.pipe()]
    for reader, writer in pipes:
        os.write(writer, b"x")
        others = [r for r, _ in pipes if r != reader]
        loop.watch(reader, lambda r=reader, o=others[0]: (called.append(r), loop.forget(o)))  # type: ignore[misc]
    loop.turn(10.0)
    assert len(called) == 1
    for pipe in pipes:
        os.close(pipe[0])
        os.close(pipe[1])


def test_turn_until_gives_up_at_its_deadline() -> None:
    assert not EventLoop().turn_until(lambda: False, 0.05)


def test_a_signal_ends_the_wait_and_is_counted() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals() as signals:
        loop = EventLoop()
        loop.watch(signals.fd, signals.clear)
        for count in (1, 2):
            os.kill(os.getpid(), signal.SIGTERM)
            began = time.monotonic()
            loop.turn(30.0)
            assert signals.count == count
            assert time.monotonic() - began < 25.0
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_loop_that_stands_still_is_said_with_the_call_until_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, told, twice = EventLoop(), list[str](), threading.Event()
    words = "this process has stood still for 0 s in EventLoop._call: it waits for that call to return"

    def say(logger: str, level: int, message: str) -> None:
        told.append(message)
        if told.count(words) == 2:  # a busy machine lets the loop stand still before the call, too
            twice.set()

    monkeypatch.setattr("headrace.deploy.process.event_loop.say_on_stderr", say)
    loop.call_later(0.0, lambda: told.append("met" if twice.wait(TIMEOUT_S) else "never"))
    with StandstillWatch(loop, tmp_path, look_s=0.001):
        assert loop.turn_until(lambda: "met" in told, TIMEOUT_S)


def test_the_error_of_a_file_goes_to_its_owner_and_the_loop_goes_on() -> None:
    loop, told, fired = EventLoop(), [], []
    loop.call_later(0.0, lambda: fired.append(open("/nowhere/at/all")))  # noqa: PTH123, SIM115
    with pytest.raises(FileNotFoundError):
        loop.turn(TIMEOUT_S)
    loop.on_error = told.append
    loop.call_later(0.0, lambda: fired.append(open("/nowhere/at/all")))  # noqa: PTH123, SIM115
    loop.call_later(0.0, lambda: fired.append("next"))
    assert loop.turn_until(lambda: fired == ["next"], TIMEOUT_S)
    assert [type(error) for error in told] == [FileNotFoundError]
