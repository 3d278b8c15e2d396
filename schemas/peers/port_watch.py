"""A watch over the connections of one bound ZeroMQ socket. It bounds what libzmq does not.

libzmq bounds the size of one frame. It bounds neither the frames of a message that never ends, nor the messages that
wait, nor the connections. It keeps the frames of an unfinished message where no program can see them. So a thread looks
at the connections from the side, at no cost to messages:

    libzmq's monitor ── connection accepted, ended (descriptor) ──▶ PortWatch ── shutdown(descriptor) ──▶ peer is gone
    the kernel (TCP_INFO) ── bytes that have come on it ──────────▶
    the port's own thread ── whole messages from it ──────────────▶

Bytes that have come and are in no whole message that was taken are *held*. A peer is *known* once its HELLO, or what
the port takes for one, was accepted. A connection beyond the bounds is shut down: libzmq then frees what it holds. An
honest peer connects again. docs/internals/port-bounds.md says what is bounded, and what is not.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.schemas.basics.counted_warnings import CountedWarnings
from headrace.schemas.frames.wire_limits import DEFAULT_LIMITS
from headrace.schemas.peers.descriptors import bytes_received, peer_in_words, peer_of, shut_down
from headrace.schemas.peers.handshakes import BROKEN_OFF, DISCONNECTED, PROTOCOL, read_event

log = logging.getLogger(__name__)

ACCEPTED, CLOSED, STOPPED = 0x0020, 0x0080, 0x0400
"""libzmq's events ACCEPTED, CLOSED and MONITOR_STOPPED."""
WATCH_EVENTS = ACCEPTED | CLOSED | DISCONNECTED | BROKEN_OFF | PROTOCOL | STOPPED
"""The events that the monitor of a watched socket must report."""

HELLO_S = 60.0
"""Seconds after which a peer that has sent something must be known. A silent one may stay: a fleet's supervisor has
nothing to say until a worker dies.
"""
STRANGE_MESSAGES, STRANGER_BYTES = 64, 2 << 20
"""The most that a peer may send before it is known. It has only a HELLO to say, whose header has 1 MiB at most."""
MOST_WAITING = 1 << 16
"""The most messages that may wait of one peer. An honest one repeats a window of 1,024 at most."""

LOOK_S = 0.25
"""Seconds between two looks."""
_REST_RATIO = 50
"""The watch rests at least so many times as long as a look took. A look at a thousand connections takes 10 ms."""
_LOOKS_BEHIND = 4
"""Looks in a row that must find too many messages. One large message under way looks the same, until those before it
are taken.
"""
_FREE_BYTES_S = 256
"""Bytes that a connection may receive in a second in addition to messages: heartbeats of the protocol."""
_GREETING_BYTES = 4096
"""Bytes that a connection may receive before its first message: the handshake."""
_BURST = 512


class Watched(Protocol):
    """A ZeroMQ socket."""

    def disable_monitor(self) -> None:
        """End the monitor of the socket."""


class Monitor(Protocol):
    """The monitor of a ZeroMQ socket, as its `get_monitor_socket(WATCH_EVENTS)` returns it."""

    def poll(self, timeout: int) -> int:
        """Return whether a message waits, after at most `timeout` milliseconds."""

    def recv_multipart(self) -> list[bytes]:
        """Return the next message."""

    def close(self, linger: int) -> None:
        """Close the monitor's end."""


@dataclass(frozen=True, slots=True)
class PortBounds:
    """The bounds of one port. Sizes in bytes."""

    connections: int
    message_bytes: int = DEFAULT_LIMITS.payload_bytes
    """The largest message: no connection may hold more as an unfinished one."""
    held_bytes: int = 1 << 30
    """The most that all connections hold together."""
    admits_all: bool = False
    """True for a port whose peers send no messages: all are known."""


@dataclass(slots=True, eq=False)
class PeerAccount:
    """The whole messages of one connection, as the port's own thread has counted them."""

    route: bytes = b""
    """The ROUTER's name for the connection. It gives each name once and in order, while descriptors are used again."""
    taken: int = 0
    """Bytes of them."""
    messages: int = 0
    known: bool = False


@dataclass(slots=True, eq=False)
class _Connection:
    fd: int
    peer: tuple[str, int]
    since: float
    account: PeerAccount | None = None
    received: int = 0
    """Bytes that had come at the last look."""
    base: int = _GREETING_BYTES
    """Bytes of them that are in messages that were taken."""
    taken: int = 0
    messages: int = 0
    """Bytes and messages that the account had at the last look."""
    held: int = 0
    unfinished: int = 0
    """Bytes that it held at the look before, if they are part of one message: nothing else waited at the port since."""
    behind: int = 0
    """Looks in a row at which too many of its messages waited."""
    cut: bool = False


class PortWatch:
    """Watches one bound socket, which the caller has given a monitor, from a thread of its own until `close`.

    `heard`, `emptied` and `end` are called by the thread that receives from the socket. `on_failed_handshake` is called
    with (event, value) in the watch's thread.
    """

    def __init__(
        self,
        name: str,
        monitor: Monitor,
        bounds: PortBounds,
        on_failed_handshake: Callable[[int, int], None] = lambda event, value: None,
    ) -> None:
        self._name, self._monitor, self._bounds = name, monitor, bounds
        self._on_failed_handshake = on_failed_handshake
        self._warnings = CountedWarnings(log)
        self.cuts: Counter[str] = Counter()
        """Number of connections that were shut down, by reason."""
        self._connections: dict[int, _Connection] = {}
        self._accounts: dict[int, PeerAccount] = {}
        """By descriptor, of the newest connection that has sent a message there."""
        self._emptied = self._emptied_seen = 0
        self._ended: deque[tuple[int, tuple[str, int], str]] = deque()
        """Connections that `end` has shut down, to be counted."""
        self._thread = threading.Thread(target=self._run, name=f"watch of {name}", daemon=True)
        self._thread.start()

    # -- for the thread that receives ---------------------------------------------------------------------------------

    def heard(self, fd: int, route: bytes, nbytes: int) -> PeerAccount:
        """Count a whole message of the connection at `fd`, which `source_of` knows. Return the account.

        nbytes: without the route, so no more than what has come.
        """
        account = self._accounts.get(fd)
        if account is None or account.route != route:
            before, account = account, PeerAccount(route)
            if before is None or before.route < route:  # else it was left by a connection that has ended
                self._accounts[fd] = account
        account.taken += nbytes
        account.messages += 1
        return account

    def emptied(self) -> None:
        """Note that no whole message waits at the socket."""
        self._emptied += 1

    def end(self, fd: int, peer: tuple[str, int], why: str) -> None:
        """End the connection at `fd` if it still is that of `peer`, a result of `peer_of`.

        The peer gets no further message.
        """
        if shut_down(fd, peer):
            self._ended.append((fd, peer, why))

    def close(self, socket: Watched) -> None:
        """Stop the monitor of `socket`, the one that is watched, and wait for the end of the watch."""
        socket.disable_monitor()
        self._thread.join()

    # -- the watch ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        look_at = 0.0
        try:
            while self._take_events(look_at - time.monotonic()):
                began = time.monotonic()
                if began >= look_at:
                    self._try(self._look, began)
                    took = time.monotonic() - began
                    look_at = began + took + max(LOOK_S, _REST_RATIO * took)
        except Exception:
            log.exception(
                "the watch of the %s port has ended: nothing bounds its connections until a restart", self._name
            )
        finally:
            self._monitor.close(0)

    def _try(self, part: Callable[..., None], *args: Any, **named: Any) -> None:
        """Do a part of the watch. An error in it is logged, and must not end the bounds of the port."""
        try:
            part(*args, **named)
        except Exception as error:  # noqa: BLE001
            self._warnings.failed(f"the watch of the {self._name} port failed once, and goes on", error)

    def _take_events(self, wait_s: float) -> bool:
        """Take what the monitor says, a burst at most, or wait for it. Return False once the monitor has ended."""
        wait_ms = max(0, round(wait_s * 1000))
        for _ in range(_BURST):
            if not self._monitor.poll(wait_ms):
                break
            event, value = read_event(self._monitor.recv_multipart())
            if event == STOPPED:
                return False
            self._try(self._take_event, event, value)
            wait_ms = 0
        return True

    def _take_event(self, event: int, value: int) -> None:
        if event == ACCEPTED:
            self._admit(value)
        elif event == DISCONNECTED:
            self._connections.pop(value, None)
            self._accounts.pop(value, None)
        elif event in (BROKEN_OFF, PROTOCOL):
            self._on_failed_handshake(event, value)

    def _admit(self, fd: int) -> None:
        """Watch a new connection. Beyond the bound, cut the oldest whose peer is not known; else the new one."""
        peer = peer_of(fd)
        if peer is None:  # it has ended already
            return
        new = self._connections[fd] = _Connection(fd, peer, time.monotonic())
        if len(self._connections) > self._bounds.connections:
            others = (c for c in self._connections.values() if not (c.cut or self._is_known(c)))
            self._cut(next(others, new), f"more than {self._bounds.connections} connections")

    def _is_known(self, connection: _Connection) -> bool:
        account = self._accounts.get(connection.fd)
        return self._bounds.admits_all or (account is not None and account.known)

    def _look(self, now: float) -> None:
        while self._ended:
            fd, peer, why = self._ended.popleft()
            connection = self._connections.get(fd)
            if connection is not None and connection.peer == peer:
                connection.cut = True
            self._count(peer, why)
        emptied, self._emptied_seen = self._emptied != self._emptied_seen, self._emptied
        for connection in self._connections.values():
            if not connection.cut:
                self._try(self._look_at, connection, now, emptied=emptied)
        self._judge_together()

    def _look_at(self, connection: _Connection, now: float, *, emptied: bool) -> None:
        self._measure(connection, now, emptied=emptied)
        if why := self._judge(connection, now):
            self._cut(connection, why)

    def _measure(self, connection: _Connection, now: float, *, emptied: bool) -> None:
        """Read how much the connection holds, and whether too many of its messages wait.

        If a message was taken and the port was empty since, all bytes that had come at the last look were taken too.
        """
        account = self._accounts.get(connection.fd)
        taken, messages = (account.taken, account.messages) if account is not None else (0, 0)
        received = bytes_received(connection.fd)
        if received and taken > received:  # messages of an earlier connection at this descriptor, read late
            account, taken, messages = None, 0, 0
        if account is not connection.account:
            connection.account, connection.taken, connection.messages = account, 0, 0
        news, connection.taken = taken - connection.taken, taken
        count, connection.messages = messages - connection.messages, messages
        connection.base += news
        if news and emptied:
            connection.base = max(connection.base, connection.received)
        connection.unfinished = connection.held if emptied and not news else 0
        connection.received = received
        free = _FREE_BYTES_S * (now - connection.since)
        connection.held = max(0, received - connection.base - round(free))
        if emptied:
            connection.behind = 0
        elif news:
            is_behind = connection.held * count > MOST_WAITING * news  # by the mean size of those that were taken
            connection.behind = connection.behind + 1 if is_behind else 0

    def _judge(self, connection: _Connection, now: float) -> str:
        """Return why the connection must end; "" if it may stay."""
        most, account = self._bounds.message_bytes, connection.account
        if self._bounds.admits_all:
            return "bytes at a port that only sends" if connection.held > most else ""
        if account is None or not account.known:
            if connection.messages >= STRANGE_MESSAGES or connection.taken + connection.unfinished > STRANGER_BYTES:
                return "messages without HELLO"
            if now - connection.since > HELLO_S and (account is not None or connection.unfinished):
                return f"no HELLO that was accepted in {HELLO_S:g} s"
        if connection.unfinished > most:
            return f"an unfinished message of more than {most >> 20} MiB"
        return f"more than {MOST_WAITING:,} messages wait" if connection.behind >= _LOOKS_BEHIND else ""

    def _judge_together(self) -> None:
        """Cut connections, the one that holds most first, until the rest holds as much as all may."""
        holders = [c for c in self._connections.values() if c.held and not c.cut]
        held, most = sum(c.held for c in holders), self._bounds.held_bytes
        for connection in sorted(holders, key=lambda c: c.held, reverse=True):
            if held <= most:
                return
            held -= connection.held
            self._cut(connection, f"all connections held more than {most >> 20} MiB of unfinished messages")

    def _cut(self, connection: _Connection, why: str) -> None:
        """Shut the connection down and count that, unless its descriptor belongs to another connection now."""
        connection.cut = True
        if shut_down(connection.fd, connection.peer):
            self._count(connection.peer, why)

    def _count(self, peer: tuple[str, int], why: str) -> None:
        self.cuts[why] += 1
        text = (
            f"closed a connection of {peer_in_words(peer)} at the {self._name} port: {why}; {self.cuts[why]:,} so far"
        )
        self._warnings.warn(b"", why, text)
