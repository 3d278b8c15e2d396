"""The dispatcher of a policy server: carries requests from a listener to the sessions, and answers back.

One thread at a time runs the dispatcher's loop. Other threads enqueue events with `post`. The sampler's thread runs the
loop while it waits for requests, so a step crosses no threads. When the sampler is busy for longer (it ships chunks,
waits for the broker, or loads weights), the thread that called `serve` runs the loop instead. So clients are heard, and
their sessions do not time out.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from headrace.schemas.accounts.worker_figures import ServingFigures
from headrace.workers.serving.acting_channel import ActingChannel
from headrace.workers.serving.client_sessions import ClientSessions
from headrace.workers.serving.episode_codec import EpisodeCodec
from headrace.workers.serving.session_episodes import ServedEpisodes
from headrace.workers.serving.session_records import ServingLimits

Event = Callable[[ClientSessions, float], None]
"""Something to do with the sessions; called with the time."""


class Listener(Protocol):
    """Receives requests of clients. Only the thread that runs the dispatcher's loop calls it."""

    def watch(self, fd: int) -> None:
        """Have `wait` return when `fd` is readable, too."""

    def wait(self, timeout_s: float) -> None:
        """Block until a request or a watched descriptor is ready, at most `timeout_s`."""

    def deliver_to(self, sessions: ClientSessions, now: float) -> None:
        """Hand all requests that have arrived to the sessions."""

    def close(self) -> None:
        """Accept no more clients. May block for about a second, in which the loop does not run."""


_SAMPLER_AWAY_S = 0.05
"""Seconds that the sampler may be away before the thread in `serve` runs the loop."""


class Dispatcher:
    """Owns the sessions and runs their loop. Call `close` once, after `serve` has returned.

    `waiting_for`: see `ClientSessions`.
    """

    def __init__(
        self,
        episodes: ServedEpisodes,
        codec: EpisodeCodec,
        limits: ServingLimits,
        listener: Listener,
        channel: ActingChannel | None = None,
        waiting_for: Callable[[], str] = str,
    ) -> None:
        self._sessions = ClientSessions(episodes, codec.spaces_json, self._post_call, limits, channel, waiting_for)
        self._listener = listener
        self._events: deque[Event] = deque()
        self._wakeup_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._listener.watch(self._wakeup_fd)
        self._round_s = min(limits.lease_s / 10, 1.0)
        """The longest round of the loop."""
        self._tick_at = 0.0
        self._loop_lock = threading.Lock()
        """Held by the thread that runs the loop."""
        self._sampler_left_at = -_SAMPLER_AWAY_S
        """Time at which the sampler last ran the loop; inf while it waits for the loop or runs it."""
        self._stopping = threading.Event()
        self._closed = self._woken = False
        self._lock = threading.Lock()

    def post(self, event: Event) -> None:
        """Enqueue an event for the loop. Any thread may call; does not block; does nothing after `close`."""
        self._events.append(event)
        if self._loop_lock.locked():  # otherwise no thread sleeps, and the next round starts with the queue
            self._wake()

    def figures(self) -> ServingFigures:
        """Return what was served so far. Any thread may call."""
        return self._sessions.figures()

    def stop(self) -> None:
        """Make `serve` return. Any thread may call."""
        self._stopping.set()
        self._wake()

    def run_once(self, timeout_s: float) -> None:
        """Run one round of the loop, at most `timeout_s`. Only the sampler's thread calls it, while it waits."""
        self._sampler_left_at = math.inf  # from now on the thread in `serve` does not wait while it holds the lock
        try:
            if self._loop_lock.locked():
                self._wake()  # the thread in `serve` holds the lock: it wakes up and releases it
            with self._loop_lock:  # Ctrl-C between a call of `acquire` and a `try` would leave it locked for ever
                if not self._closed:
                    self._run_round(min(timeout_s, self._round_s), self._stopping.is_set)
        finally:  # Ctrl-C may interrupt any call; without the first line the thread in `serve` would wait for ever
            self._sampler_left_at = -math.inf
            self._sampler_left_at = time.monotonic()
        if self._closed or self._stopping.is_set():
            time.sleep(min(timeout_s, _SAMPLER_AWAY_S))  # the loop has ended; a caller that waits must not spin

    def flush(self) -> None:
        """Send the sampler's answers now. The sampler calls it when it will not wait for a while."""
        left_at, self._sampler_left_at = self._sampler_left_at, math.inf  # and locked as in `run_once`
        try:
            if not self._loop_lock.locked():  # otherwise the other thread was woken when they were posted
                with self._loop_lock:
                    if not self._closed:
                        self._run_queues(time.monotonic())
        finally:
            self._sampler_left_at = left_at

    def serve(self) -> None:
        """Run the loop whenever the sampler is away, until `stop`. Then end all sessions and tell waiting clients."""
        while not self._stopping.is_set():
            if not self._run_for_sampler():
                self._stopping.wait(_SAMPLER_AWAY_S)
        with self._loop_lock:
            self._sessions.close()
            self._run_queues(time.monotonic())

    def _run_for_sampler(self) -> bool:
        """Run a round; return False if the sampler runs the loop, or did so a moment ago."""
        if not self._loop_lock.acquire(blocking=False):
            return False
        try:
            return self._run_round(self._round_s, self._must_yield)
        finally:
            self._loop_lock.release()

    def _must_yield(self) -> bool:
        return self._stopping.is_set() or time.monotonic() - self._sampler_left_at < _SAMPLER_AWAY_S

    def close(self) -> None:
        """Close the listener. The loop does not run any more, and posted events are dropped."""
        with self._loop_lock, self._lock:
            self._closed = True
        try:
            self._listener.close()
        finally:
            os.close(self._wakeup_fd)

    # -- a round of the loop ------------------------------------------------------------------------------------------

    def _run_round(self, timeout_s: float, must_yield: Callable[[], bool]) -> bool:
        """Wait for requests and handle them. Return False at once, without waiting, if `must_yield` says so."""
        if self._events or self._woken:
            self._run_queues(time.monotonic())  # send answers before waiting
        if must_yield():  # asked after the wakeup was read: the sampler may have sent it to get the loop
            return False
        self._listener.wait(timeout_s)
        now = time.monotonic()
        self._listener.deliver_to(self._sessions, now)
        if now >= self._tick_at:
            self._tick_at = now + self._round_s / 4
            self._sessions.tick(now)
        self._run_queues(now)
        return True

    def _run_queues(self, now: float) -> None:
        if self._woken:
            with self._lock:
                self._woken = False  # before the queues are read: a later post wakes the loop again
                os.eventfd_read(self._wakeup_fd)  # last: Ctrl-C after it would leave a wakeup that is not there
        while self._events:
            self._events.popleft()(self._sessions, now)

    def _wake(self) -> None:
        with self._lock:
            if not (self._closed or self._woken):
                self._woken = True
                os.eventfd_write(self._wakeup_fd, 1)

    def _post_call(self, call: Callable[[], None]) -> None:
        self.post(lambda sessions, now: call())
