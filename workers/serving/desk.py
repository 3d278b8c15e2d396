"""Where a policy server's sessions live: what comes in at any door, and what the sampler answers.

The sampler's thread turns the desk itself while it waits for somebody to act for, so that a step needs no other thread.
When it is away for longer (it ships, waits for a broker, loads weights) the thread that called `serve` stands in, so
that clients are heard and not thought lost.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from headrace.workers.serving.acting_clients import ActingClients
from headrace.workers.serving.episodes import Answer, Episodes
from headrace.workers.serving.exchange import Exchange
from headrace.workers.serving.records import Address, EpisodeRecord, Reply, ServingLimits
from headrace.workers.serving.sessions import Sessions
from headrace.workers.serving.space_values import SpaceValues

Event = Callable[[Sessions, float], None]
"""Something to do with the sessions, at that time."""


class Door(Protocol):
    """A way in that is looked after by whoever has the turn."""

    def watch(self, fd: int) -> None:
        """Have `wait` return when this is readable too."""

    def wait(self, timeout_s: float) -> None:
        """Sleep until something comes."""

    def take_in(self, sessions: Sessions, now: float) -> None:
        """Hand what has come to the sessions."""

    def close(self) -> None:
        """Let nobody in any more. May take a moment, in which nobody has a turn."""


_AWAY_S = 0.05
"""For so long the sampler may be away before the other thread stands in for it."""


class Desk:
    """Served by whoever has the turn; everybody else posts. `close` once, when `serve` has returned."""

    def __init__(
        self,
        episodes: Episodes,
        values: SpaceValues,
        limits: ServingLimits,
        door: Door,
        exchange: Exchange | None = None,
    ) -> None:
        acting = ActingClients(exchange, self._post_shipped) if exchange is not None else None
        self._sessions = Sessions(episodes, values.told, self._post_answer, limits, acting)
        self._door = door
        self._mail: deque[Event] = deque()
        self._answers: deque[tuple[EpisodeRecord, Answer]] = deque()
        """Mail of the sampler, of which there is most."""
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._door.watch(self._bell)
        self._slice_s = min(limits.lease_s / 10, 1.0)
        self._tick_at = 0.0
        self._turning = threading.Lock()
        """Held by the thread that has the turn."""
        self._left_at = -_AWAY_S
        """When the sampler last had the turn; inf while it asks for it, or has it."""
        self._stopping = threading.Event()
        self._closed = self._rung = False
        self._lock = threading.Lock()

    def post(self, event: Event) -> None:
        """Have this done by whoever turns next. For any thread; does not wait, and does nothing after `close`."""
        self._mail.append(event)
        if self._turning.locked():  # else nobody sleeps, and the next who turns looks at the mail first
            self._ring()

    def stop(self) -> None:
        """Have `serve` return. For any thread."""
        self._stopping.set()
        self._ring()

    def turn(self, timeout_s: float) -> None:
        """Serve until something has happened, at most `timeout_s`. For the sampler's thread, when it waits."""
        self._left_at = math.inf
        try:
            if not self._turning.acquire(blocking=False):
                self._ring()  # who stands in sleeps no longer, and leaves
                self._turning.acquire()
            try:
                if not self._closed:
                    self._turn(min(timeout_s, self._slice_s), self._stopping.is_set)
            finally:
                self._turning.release()
        finally:  # by Ctrl-C too, of which there may be one in each of these lines: else nobody would stand in again
            self._left_at = time.monotonic()
        if self._closed or self._stopping.is_set():
            time.sleep(min(timeout_s, _AWAY_S))  # nothing happens here any more, and who waits is not to spin

    def deliver(self) -> None:
        """Send what the sampler has answered. For its thread, when it has other things to do before it waits."""
        if self._turning.acquire(blocking=False):  # else who stands in was called when they were posted
            try:
                if not self._closed:
                    self._settle(time.monotonic())
            finally:
                self._turning.release()

    def serve(self) -> None:
        """Stand in for the sampler until `stop`; then all sessions end, and their clients are told where they wait."""
        while not self._stopping.is_set():
            if not self._stand_in():
                self._stopping.wait(_AWAY_S)
        with self._turning:
            self._sessions.close()
            self._settle(time.monotonic())

    def _stand_in(self) -> bool:
        """A turn, if the sampler takes none."""
        if not self._turning.acquire(blocking=False):
            return False
        try:
            return self._turn(self._slice_s, self._is_not_away)
        finally:
            self._turning.release()

    def _is_not_away(self) -> bool:
        return self._stopping.is_set() or time.monotonic() - self._left_at < _AWAY_S

    def close(self) -> None:
        """Nobody has a turn any more, what is posted is for nobody, and the door is closed."""
        with self._turning, self._lock:
            self._closed = True
        try:
            self._door.close()
        finally:
            os.close(self._bell)

    # -- a turn -------------------------------------------------------------------------------------------------------

    def _turn(self, timeout_s: float, leaves: Callable[[], bool]) -> bool:
        """False if it was left at once, for what `leaves` says."""
        if self._answers or self._mail or self._rung:
            self._settle(time.monotonic())  # answers leave before anybody sleeps
        if leaves():  # asked after the bell was read, for it may have rung for just this
            return False
        self._door.wait(timeout_s)
        now = time.monotonic()
        self._door.take_in(self._sessions, now)
        if now >= self._tick_at:
            self._tick_at = now + self._slice_s / 4
            self._sessions.tick(now)
        self._settle(now)
        return True

    def _settle(self, now: float) -> None:
        if self._rung:
            with self._lock:
                os.eventfd_read(self._bell)
                self._rung = False  # before looking: what comes later rings again
        while self._answers:
            self._sessions.answered(*self._answers.popleft())
        while self._mail:
            self._mail.popleft()(self._sessions, now)
        for address, reply in self._sessions.take_outbox():
            address.send(reply)

    def _ring(self) -> None:
        with self._lock:
            if not (self._closed or self._rung):
                self._rung = True
                os.eventfd_write(self._bell, 1)

    def _post_answer(self, episode: EpisodeRecord, answer: Answer) -> None:
        self._answers.append((episode, answer))
        if self._turning.locked():
            self._ring()

    def _post_shipped(self, tell: Callable[[], tuple[Address, Reply] | None]) -> None:
        self.post(lambda sessions, now: sessions.say(tell()))
