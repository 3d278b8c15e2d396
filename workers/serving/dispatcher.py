"""Where a policy server's sessions live: what comes in at any listener, and what the sampler answers.

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

from headrace.workers.serving.acting_channel import ActingChannel
from headrace.workers.serving.acting_clients import ActingClients
from headrace.workers.serving.client_sessions import ClientSessions
from headrace.workers.serving.episode_codec import EpisodeCodec
from headrace.workers.serving.open_episodes import OpenEpisodes, StepAnswer
from headrace.workers.serving.session_records import Address, EpisodeRecord, Reply, ServingLimits

Event = Callable[[ClientSessions, float], None]
"""Something to do with the sessions, at that time."""


class Listener(Protocol):
    """A way in that is looked after by whoever has the run_once."""

    def watch(self, fd: int) -> None:
        """Have `wait` return when this is readable too."""

    def wait(self, timeout_s: float) -> None:
        """Sleep until something comes."""

    def deliver_to(self, sessions: ClientSessions, now: float) -> None:
        """Hand what has come to the sessions."""

    def close(self) -> None:
        """Let nobody in any more. May take a moment, in which nobody has a run_once."""


_SAMPLER_AWAY_S = 0.05
"""For so long the sampler may be away before the other thread stands in for it."""


class Dispatcher:
    """Served by whoever has the run_once; everybody else posts. `close` once, when `serve` has returned."""

    def __init__(
        self,
        episodes: OpenEpisodes,
        codec: EpisodeCodec,
        limits: ServingLimits,
        listener: Listener,
        channel: ActingChannel | None = None,
    ) -> None:
        acting = ActingClients(channel, self._post_shipped) if channel is not None else None
        self._sessions = ClientSessions(episodes, codec.spaces_json, self._post_answer, limits, acting)
        self._listener = listener
        self._events: deque[Event] = deque()
        self._answers: deque[tuple[EpisodeRecord, StepAnswer]] = deque()
        """Mail of the sampler, of which there is most."""
        self._wakeup_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._listener.watch(self._wakeup_fd)
        self._slice_s = min(limits.lease_s / 10, 1.0)
        self._tick_at = 0.0
        self._loop_lock = threading.Lock()
        """Held by the thread that has the run_once."""
        self._sampler_left_at = -_SAMPLER_AWAY_S
        """When the sampler last had the run_once; inf while it asks for it, or has it."""
        self._stopping = threading.Event()
        self._closed = self._woken = False
        self._lock = threading.Lock()

    def post(self, event: Event) -> None:
        """Have this done by whoever turns next. For any thread; does not wait, and does nothing after `close`."""
        self._events.append(event)
        if self._loop_lock.locked():  # else nobody sleeps, and the next who turns looks at the mail first
            self._wake()

    def stop(self) -> None:
        """Have `serve` return. For any thread."""
        self._stopping.set()
        self._wake()

    def run_once(self, timeout_s: float) -> None:
        """Serve until something has happened, at most `timeout_s`. For the sampler's thread, when it waits."""
        self._sampler_left_at = math.inf
        try:
            if not self._loop_lock.acquire(blocking=False):
                self._wake()  # who stands in sleeps no longer, and leaves
                self._loop_lock.acquire()
            try:
                if not self._closed:
                    self._run_round(min(timeout_s, self._slice_s), self._stopping.is_set)
            finally:
                self._loop_lock.release()
        finally:  # by Ctrl-C too, of which there may be one in each of these lines: else nobody would stand in again
            self._sampler_left_at = time.monotonic()
        if self._closed or self._stopping.is_set():
            time.sleep(min(timeout_s, _SAMPLER_AWAY_S))  # nothing happens here any more, and who waits is not to spin

    def flush(self) -> None:
        """Send what the sampler has answered. For its thread, when it has other things to do before it waits."""
        if self._loop_lock.acquire(blocking=False):  # else who stands in was called when they were posted
            try:
                if not self._closed:
                    self._run_queues(time.monotonic())
            finally:
                self._loop_lock.release()

    def serve(self) -> None:
        """Stand in for the sampler until `stop`; then all sessions end, and clients that wait are told."""
        while not self._stopping.is_set():
            if not self._run_for_sampler():
                self._stopping.wait(_SAMPLER_AWAY_S)
        with self._loop_lock:
            self._sessions.close()
            self._run_queues(time.monotonic())

    def _run_for_sampler(self) -> bool:
        """A run_once, if the sampler takes none."""
        if not self._loop_lock.acquire(blocking=False):
            return False
        try:
            return self._run_round(self._slice_s, self._must_stop)
        finally:
            self._loop_lock.release()

    def _must_stop(self) -> bool:
        return self._stopping.is_set() or time.monotonic() - self._sampler_left_at < _SAMPLER_AWAY_S

    def close(self) -> None:
        """Nobody has a run_once any more, what is posted is for nobody, and the listener is closed."""
        with self._loop_lock, self._lock:
            self._closed = True
        try:
            self._listener.close()
        finally:
            os.close(self._wakeup_fd)

    # -- a round -------------------------------------------------------------------------------------------------------

    def _run_round(self, timeout_s: float, leaves: Callable[[], bool]) -> bool:
        """False if it was left at once, for what `leaves` says."""
        if self._answers or self._events or self._woken:
            self._run_queues(time.monotonic())  # answers leave before anybody sleeps
        if leaves():  # asked after the bell was read, for it may have rung for just this
            return False
        self._listener.wait(timeout_s)
        now = time.monotonic()
        self._listener.deliver_to(self._sessions, now)
        if now >= self._tick_at:
            self._tick_at = now + self._slice_s / 4
            self._sessions.tick(now)
        self._run_queues(now)
        return True

    def _run_queues(self, now: float) -> None:
        if self._woken:
            with self._lock:
                os.eventfd_read(self._wakeup_fd)
                self._woken = False  # before looking: what comes later rings again
        while self._answers:
            self._sessions.answered(*self._answers.popleft())
        while self._events:
            self._events.popleft()(self._sessions, now)
        for address, reply in self._sessions.take_outbox():
            address.send(reply)

    def _wake(self) -> None:
        with self._lock:
            if not (self._closed or self._woken):
                self._woken = True
                os.eventfd_write(self._wakeup_fd, 1)

    def _post_answer(self, episode: EpisodeRecord, answer: StepAnswer) -> None:
        self._answers.append((episode, answer))
        if self._loop_lock.locked():
            self._wake()

    def _post_shipped(self, tell: Callable[[], tuple[Address, Reply] | None]) -> None:
        self.post(lambda sessions, now: sessions.say(tell()))
