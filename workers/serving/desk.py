"""The thread in which a policy server's sessions live: what comes in at any door, and what the sampler answers."""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from headrace.workers.serving.acting_clients import ActingClients
from headrace.workers.serving.episodes import Answer, Episodes
from headrace.workers.serving.exchange import Exchange
from headrace.workers.serving.records import Address, Asked, Reply, ServingLimits
from headrace.workers.serving.sessions import Sessions
from headrace.workers.serving.space_values import SpaceValues

Event = Callable[[Sessions, float], None]
"""Something to do with the sessions, at that time."""


class Door(Protocol):
    """A way in that the desk's own thread looks after."""

    def watch(self, fd: int) -> None:
        """Have `wait` return when this is readable too."""

    def wait(self, timeout_s: float) -> None:
        """Sleep until something comes."""

    def take_in(self, sessions: Sessions, now: float) -> None:
        """Hand what has come to the sessions."""


class Desk:
    """Serves in the thread that calls `serve`; everybody else posts. `close` once, when that has returned."""

    def __init__(
        self,
        episodes: Episodes,
        values: SpaceValues,
        limits: ServingLimits,
        door: Door | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        acting = ActingClients(exchange, self._post_shipped) if exchange is not None else None
        self._sessions = Sessions(episodes, values.told, self._post_answer, limits, acting)
        self._door = door or _NoDoor()
        self._mail: deque[Event] = deque()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._door.watch(self._bell)
        self._slice_s = min(limits.lease_s / 10, 1.0)
        self._stopping = self._closed = self._rung = False
        self._lock = threading.Lock()

    def post(self, event: Event) -> None:
        """Have the desk's thread do this soon. For any thread; does not wait, and does nothing after `close`."""
        self._mail.append(event)
        with self._lock:
            if not (self._closed or self._rung):  # who rang is not heard yet, and then all mail is looked through
                self._rung = True
                os.eventfd_write(self._bell, 1)

    def stop(self) -> None:
        """Have `serve` return. For any thread."""
        self._stopping = True
        self.post(lambda sessions, now: None)

    def serve(self) -> None:
        """Serve until `stop`; then all sessions end, and their clients are told so where they wait."""
        while not self._stopping:
            self._door.wait(self._slice_s)
            now = time.monotonic()
            self._door.take_in(self._sessions, now)
            self._open_mail(now)
            self._sessions.tick(now)
            self._send()
        self._sessions.close()
        self._send()

    def close(self) -> None:
        """What is posted from now on is for nobody."""
        with self._lock:
            self._closed = True
            os.close(self._bell)

    def _open_mail(self, now: float) -> None:
        with self._lock:
            if self._rung:
                os.eventfd_read(self._bell)
                self._rung = False  # before looking: what comes later rings again
        while self._mail:
            self._mail.popleft()(self._sessions, now)

    def _send(self) -> None:
        for address, reply in self._sessions.take_outbox():
            address.send(reply)

    def _post_answer(self, asked: Asked, answer: Answer) -> None:
        self.post(lambda sessions, now: sessions.answered(asked, answer))

    def _post_shipped(self, tell: Callable[[], tuple[Address, Reply] | None]) -> None:
        self.post(lambda sessions, now: sessions.say(tell()))


class _NoDoor:
    """Where clients come by HTTP only, which posts."""

    def __init__(self) -> None:
        self._poll = select.poll()

    def watch(self, fd: int) -> None:
        self._poll.register(fd, select.POLLIN)

    def wait(self, timeout_s: float) -> None:
        self._poll.poll(timeout_s * 1000)

    def take_in(self, sessions: Sessions, now: Any) -> None:
        """Nothing comes in here."""
