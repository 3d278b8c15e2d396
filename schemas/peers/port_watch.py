"""A watch over the connections of one bound ZeroMQ socket: their number, their handshakes, and those that fail.

libzmq bounds the size of a frame, and not the number of connections. So a thread hears from the socket's monitor which
connections begin and end, and shuts down those beyond the bound. Messages cost nothing more.

libzmq also takes a frame of a handshake as large as one of a message, and keeps it until the handshake has lasted too
long. So at a port with keys the watch looks how much each peer sends before its handshake is done. It is done for a
peer that has acknowledged more than the server says before: a peer with a key reads that before it sends a message.
docs/internals/threat-model.md says what is bounded, and what is not.
"""

from __future__ import annotations

import logging
import resource
import threading
import time
from collections.abc import Callable
from typing import Any

from headrace.schemas.basics.counted_warnings import CountedWarnings
from headrace.schemas.peers.descriptors import byte_counts, peer_in_words, peer_of, shut_down
from headrace.schemas.peers.handshakes import BROKEN_OFF, DISCONNECTED, PROTOCOL, read_event

log = logging.getLogger(__name__)

ACCEPTED, STOPPED = 0x0020, 0x0400
"""libzmq's events ACCEPTED and MONITOR_STOPPED."""
WATCH_EVENTS = ACCEPTED | DISCONNECTED | BROKEN_OFF | PROTOCOL | STOPPED
"""The events that the monitor of a watched socket must report."""

_BEFORE_READY = 255
"""The most bytes that a server with CURVE says before its handshake with a peer is done: greeting, WELCOME, ERROR."""
_MOST_BEFORE_READY = 1 << 16
"""Bytes that a peer may send before its handshake is done. It needs about 600."""
_LOOK_S = 0.02
"""Seconds between two looks at few peers. The watch rests as long as it looks, so many peers cost half a core at most.
"""
_OWN_FILES = 256
"""Descriptors that a process needs in addition to connections."""


class PortWatch:
    """Watches one bound socket, which the caller has given a monitor, from a thread of its own until `close`.

    `monitor` is what the socket's `get_monitor_socket(WATCH_EVENTS)` returns. With `by_key`, the watch looks at what
    peers send before their handshake is done. `on_failed_handshake` gets (event, value), in the watch's thread.
    """

    def __init__(
        self,
        name: str,
        monitor: Any,
        most_connections: int,
        on_failed_handshake: Callable[[int, int], None] = lambda event, value: None,
        *,
        by_key: bool = False,
    ) -> None:
        self._name, self._monitor, self._most = name, monitor, most_connections
        self._on_failed_handshake = on_failed_handshake
        self._warnings = CountedWarnings(log)
        self._connections: set[int] = set()
        """Descriptors of the open connections."""
        self._by_key = by_key
        self._unknown: dict[int, tuple[str, int]] = {}
        """The peers by descriptor whose handshake may not be done."""
        self._look_at = 0.0
        self._thread = threading.Thread(target=self._run, name=f"watch of {name}", daemon=True)
        self._thread.start()

    def close(self, socket: Any) -> None:
        """Stop the monitor of the ZeroMQ socket that is watched, and wait for the end of the watch."""
        socket.disable_monitor()
        self._thread.join()

    def _run(self) -> None:
        try:
            while True:
                if self._unknown and time.monotonic() >= self._look_at:
                    self._look()
                if self._unknown and not self._monitor.poll(int(_LOOK_S * 1000)):
                    continue
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
            self._unknown.pop(value, None)
        else:
            self._on_failed_handshake(event, value)

    def _admit(self, fd: int) -> None:
        """Note a new connection. Beyond the bound, shut it down."""
        peer = peer_of(fd)
        if peer is None:  # it has ended already
            return
        self._connections.add(fd)
        if self._by_key:
            self._unknown[fd] = peer
        if len(self._connections) > self._most:
            self._end(fd, peer, f"more than {self._most} connections")

    def _look(self) -> None:
        """End the connections whose peer has sent too much for a handshake. Forget those whose handshake is done."""
        began = time.monotonic()
        for fd, peer in list(self._unknown.items()):
            counts = byte_counts(fd, peer)
            if counts is None or counts[0] > _BEFORE_READY:
                del self._unknown[fd]
            elif counts[1] > _MOST_BEFORE_READY:
                del self._unknown[fd]
                self._end(fd, peer, f"more than {_MOST_BEFORE_READY} bytes before it has shown a key")
        ended = time.monotonic()
        self._look_at = ended + max(_LOOK_S, ended - began)

    def _end(self, fd: int, peer: tuple[str, int], why: str) -> None:
        if shut_down(fd, peer):
            text = f"closed a connection of {peer_in_words(peer)} at the {self._name} port: {why}"
            self._warnings.warn(b"", why, text)


def connection_limit(most: int, ports: int = 1) -> int:
    """Return how many connections each of `ports` ports may have: `most`, if this process may open so many files.

    Raise the soft limit of open files for that as far as the system lets this process. Without descriptors left a
    process can neither write its state nor accept peers.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most * ports + _OWN_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    places = most if soft == resource.RLIM_INFINITY else min(most, max(soft - _OWN_FILES, soft // 2) // ports)
    if places < most:
        log.warning("at most %d connections at a port, not %d: this process may open only %d files", places, most, soft)
    return places
