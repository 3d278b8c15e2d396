"""The thread in `Dispatcher.serve` gives the loop to a waiting sampler, also after a long event."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from contextlib import suppress
from typing import Any

import pytest

from headrace.workers.serving.client_sessions import ClientSessions
from headrace.workers.serving.dispatcher import Dispatcher
from headrace.workers.serving.episode_codec import EpisodeCodec
from headrace.workers.serving.session_records import ServingLimits
from support.serving.plain_episodes import SPACES, PlainEpisodes
from support.waiting import TIMEOUT_S, wait_until

LONG_S = 0.2
"""More than a sampler has to be away before the other thread stands in."""


class BareListener:
    """A listener without clients. `sleepers` are the threads that have waited at it."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self.sleepers: list[str] = []

    def watch(self, fd: int) -> None:
        self._poll.register(fd, select.POLLIN)

    def wait(self, timeout_s: float) -> None:
        self.sleepers.append(threading.current_thread().name)
        self._poll.poll(timeout_s * 1000)

    def deliver_to(self, sessions: ClientSessions, now: float) -> None:
        """Nothing comes."""

    def close(self) -> None:
        """There is nothing to close."""


def test_a_waiting_sampler_runs_the_loop_next_after_a_long_event() -> None:
    listener = BareListener()
    dispatcher = Dispatcher(PlainEpisodes(), EpisodeCodec.of(SPACES), ServingLimits(lease_s=100.0), listener)
    stands_in = threading.Thread(target=dispatcher.serve, name="stands in")
    sampler = threading.Thread(target=dispatcher.run_once, args=(0.0,), name="sampler")
    busy = threading.Event()

    def keep_busy(sessions: ClientSessions, now: float) -> None:
        busy.set()
        wait_until(lambda: dispatcher._woken, what="the sampler to wake the loop")  # no other thread wakes it again
        threading.Event().wait(LONG_S)
        listener.sleepers.clear()

    stands_in.start()
    try:
        dispatcher.post(keep_busy)
        assert busy.wait(TIMEOUT_S)
        sampler.start()
        sampler.join(TIMEOUT_S)
        assert not sampler.is_alive()
        slept = list(listener.sleepers)
    finally:
        dispatcher.stop()
        stands_in.join(TIMEOUT_S)
        dispatcher.close()
    assert slept == ["sampler"]


def test_the_serve_thread_takes_over_when_ctrl_c_interrupts_a_waiting_sampler() -> None:
    listener = BareListener()
    dispatcher = Dispatcher(PlainEpisodes(), EpisodeCodec.of(SPACES), ServingLimits(lease_s=100.0), listener)
    stands_in = threading.Thread(target=dispatcher.serve)
    busy, interrupted = threading.Event(), threading.Event()

    def press_ctrl_c(sessions: ClientSessions, now: float) -> None:
        busy.set()
        wait_until(lambda: dispatcher._woken, what="the sampler to wake the loop")
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupted.wait(TIMEOUT_S)
        listener.sleepers.clear()

    stands_in.start()
    try:
        dispatcher.post(press_ctrl_c)
        assert busy.wait(TIMEOUT_S)
        with pytest.raises(KeyboardInterrupt):
            dispatcher.run_once(0.0)
        interrupted.set()
        wait_until(lambda: listener.sleepers, "a thread that waits at the listener")
    finally:
        interrupted.set()
        dispatcher.stop()
        stands_in.join(TIMEOUT_S)
        dispatcher.close()


class PressedLock:
    """A lock in whose `acquire` the user presses Ctrl-C once it is locked."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.locked, self.release = self._lock.locked, self._lock.release

    def acquire(self, *args: Any, **kwargs: Any) -> bool:
        self._lock.acquire(*args, **kwargs)
        raise KeyboardInterrupt

    def __enter__(self) -> bool:
        return self._lock.__enter__()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


@pytest.mark.parametrize("where", ["a lock", "the wakeup", "the clock"])
@pytest.mark.parametrize("call", ["run_once", "flush"])
def test_the_serve_thread_takes_over_when_ctrl_c_comes_with_the_return_of(
    where: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = BareListener()
    dispatcher = Dispatcher(PlainEpisodes(), EpisodeCodec.of(SPACES), ServingLimits(lease_s=100.0), listener)

    def press_ctrl_c(*args: int) -> None:
        if args:
            read(*args)
        raise KeyboardInterrupt

    read, arguments = os.eventfd_read, (0.0,) if call == "run_once" else ()
    dispatcher.run_once(0.0)
    with monkeypatch.context() as patch:
        if where == "a lock":
            patch.setattr(dispatcher, "_loop_lock", PressedLock())
        elif where == "the wakeup":
            dispatcher._wake()
            patch.setattr(os, "eventfd_read", press_ctrl_c)
        else:
            patch.setattr(time, "monotonic", press_ctrl_c)
        with suppress(KeyboardInterrupt):
            getattr(dispatcher, call)(*arguments)
        assert not dispatcher._loop_lock.locked()
    listener.sleepers.clear()
    stands_in, served = threading.Thread(target=dispatcher.serve), threading.Event()
    stands_in.start()
    try:
        dispatcher.post(lambda sessions, now: served.set())
        assert served.wait(TIMEOUT_S)
        wait_until(lambda: listener.sleepers, "a thread that waits at the listener")
        dispatcher.run_once(0.0)
    finally:
        dispatcher.stop()
        stands_in.join(TIMEOUT_S)
        dispatcher.close()
