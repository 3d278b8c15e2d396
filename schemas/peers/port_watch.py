"""A watch over the connections of one bound ZeroMQ socket: their number, and the handshakes that fail.

libzmq bounds the size of a frame, and not the number of connections. So a thread hears from the socket's monitor which
connections begin and end, and shuts down those beyond the bound. Messages cost nothing more.
docs/internals/port-bounds.md says what is bounded, and what is not.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol

from headrace.schemas.basics.counted_warnings import CountedWarnings
from headrace.schemas.peers.descriptors import peer_in_words, peer_of, shut_down
from headrace.schemas.peers.handshakes import BROKEN_OFF, DISCONNECTED, PROTOCOL, read_event

log = logging.getLogger(__name__)

ACCEPTED, STOPPED = 0x0020, 0x0400
"""libzmq's events ACCEPTED and MONITOR_STOPPED."""
WATCH_EVENTS = ACCEPTED | DISCONNECTED | BROKEN_OFF | PROTOCOL | STOPPED
"""The events that the monitor of a watched socket must report."""


class Watched(Protocol):
    """A ZeroMQ socket."""

    def disable_monitor(self) -> None:
        """End the monitor of the socket."""


class Monitor(Protocol):
    """The monitor of a ZeroMQ socket, as its `get_monitor_socket(WATCH_EVENTS)` returns it."""

    def recv_multipart(self) -> list[bytes]:
        """Wait for the next message, and return it."""

    def close(self, linger: int) -> None:
        """Close the monitor's end."""


class PortWatch:
    """Watches one bound socket, which the caller has given a monitor, from a thread of its own until `close`.

    `on_failed_handshake` is called with (event, value) in the watch's thread.
    """

    def __init__(
        self,
        name: str,
        monitor: Monitor,
        most_connections: int,
        on_failed_handshake: Callable[[int, int], None] = lambda event, value: None,
    ) -> None:
        self._name, self._monitor, self._most = name, monitor, most_connections
        self._on_failed_handshake = on_failed_handshake
        self._warnings = CountedWarnings(log)
        self._connections: set[int] = set()
        """Descriptors of the open connections."""
        self._thread = threading.Thread(target=self._run, name=f"watch of {name}", daemon=True)
        self._thread.start()

    def close(self, socket: Watched) -> None:
        """Stop the monitor of `socket`, the one that is watched, and wait for the end of the watch."""
        socket.disable_monitor()
        self._thread.join()

    def _run(self) -> None:
        try:
            while True:
                event, value = read_event(self._monitor.recv_multipart())
                if event == STOPPED:
                    return
                self._take(event, value)
        except Exception:
            log.exception(
                "the watch of the %s port has ended: nothing bounds its connections until a restart", self._name
            )
        finally:
            self._monitor.close(0)

    def _take(self, event: int, value: int) -> None:
        if event == ACCEPTED:
            self._admit(value)
        elif event == DISCONNECTED:
            self._connections.discard(value)
        else:
            self._on_failed_handshake(event, value)

    def _admit(self, fd: int) -> None:
        """Note a new connection. Beyond the bound, shut it down."""
        peer = peer_of(fd)
        if peer is None:  # it has ended already
            return
        self._connections.add(fd)
        if len(self._connections) > self._most and shut_down(fd, peer):
            why = f"more than {self._most} connections"
            self._warnings.warn(
                b"", why, f"closed a connection of {peer_in_words(peer)} at the {self._name} port: {why}"
            )
