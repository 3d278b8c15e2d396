"""Who stands in at the desk gives way to the sampler, however long that had to wait for its turn."""

from __future__ import annotations

import os
import select
import signal
import threading

import pytest

from headrace.workers.serving.desk import Desk
from headrace.workers.serving.records import ServingLimits
from headrace.workers.serving.sessions import Sessions
from headrace.workers.serving.space_values import SpaceValues
from support.serving.plain_episodes import SPACES, PlainEpisodes
from support.waiting import wait_until

LONG_S = 0.2
"""More than a sampler has to be away before the other thread stands in."""


class BareDoor:
    """A way in by which nobody comes. `sleepers` are the threads that have waited at it."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self.sleepers: list[str] = []

    def watch(self, fd: int) -> None:
        self._poll.register(fd, select.POLLIN)

    def wait(self, timeout_s: float) -> None:
        self.sleepers.append(threading.current_thread().name)
        self._poll.poll(timeout_s * 1000)

    def take_in(self, sessions: Sessions, now: float) -> None:
        """Nothing comes."""

    def close(self) -> None:
        """There is nothing to close."""


def test_a_sampler_that_waits_for_its_turn_is_next_though_who_stands_in_was_busy_for_long() -> None:
    door = BareDoor()
    desk = Desk(PlainEpisodes(), SpaceValues.of(SPACES), ServingLimits(lease_s=100.0), door)
    stands_in = threading.Thread(target=desk.serve, name="stands in")
    sampler = threading.Thread(target=desk.turn, args=(0.0,), name="sampler")
    busy = threading.Event()

    def keep_busy(sessions: Sessions, now: float) -> None:
        busy.set()
        wait_until(lambda: desk._rung, what="the sampler at the bell")  # which nobody rings again
        threading.Event().wait(LONG_S)
        door.sleepers.clear()

    stands_in.start()
    try:
        desk.post(keep_busy)
        assert busy.wait(100.0)
        sampler.start()
        sampler.join(100.0)
        assert not sampler.is_alive()
        slept = list(door.sleepers)
    finally:
        desk.stop()
        stands_in.join(100.0)
        desk.close()
    assert slept == ["sampler"]


def test_a_sampler_that_is_interrupted_while_it_waits_for_its_turn_is_stood_in_for() -> None:
    door = BareDoor()
    desk = Desk(PlainEpisodes(), SpaceValues.of(SPACES), ServingLimits(lease_s=100.0), door)
    stands_in = threading.Thread(target=desk.serve)
    busy, interrupted = threading.Event(), threading.Event()

    def press_ctrl_c(sessions: Sessions, now: float) -> None:
        busy.set()
        wait_until(lambda: desk._rung, what="the sampler at the bell")
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupted.wait(100.0)
        door.sleepers.clear()

    stands_in.start()
    try:
        desk.post(press_ctrl_c)
        assert busy.wait(100.0)
        with pytest.raises(KeyboardInterrupt):
            desk.turn(0.0)
        interrupted.set()
        wait_until(lambda: door.sleepers, timeout_s=20, what="somebody at the door")
    finally:
        interrupted.set()
        desk.stop()
        stands_in.join(100.0)
        desk.close()
