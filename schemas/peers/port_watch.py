"""A watch over the connections of one bound ZeroMQ socket. It bounds what libzmq does not.

libzmq bounds the size of one frame. It does not bound the frames of a message that never ends, the connections, or the
time that a peer may be silent. It keeps the frames of an unfinished message where no program can see them. So a thread
looks at the connections from the side, at no cost to messages:

    libzmq's monitor ── connection accepted, ended (descriptor) ──▶ PortWatch ── shutdown(descriptor) ──▶ peer is gone
    the kernel (TCP_INFO) ── bytes that have come on it ──────────▶
    the port's own thread ── bytes of whole messages from it ─────▶

Bytes that have come and are in no whole message are *held*. A peer is *known* once its HELLO, or what the port takes
for one, was accepted; before that it is a *stranger*. So is a learner that has lost the lease. A connection beyond the
bounds is shut down: libzmq then frees what it holds. An honest peer connects again. A known peer that holds nothing is
looked at every 4 s, or as soon as this process grows: a thousand of them would cost a tenth of a core otherwise.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.schemas.basics.counted_warnings import CountedWarnings
from headrace.schemas.frames.wire_limits import DEFAULT_LIMITS
from headrace.schemas.peers.admission import Admission
from headrace.schemas.peers.descriptors import (
    TELLS_PEERS,
    bytes_received,
    bytes_taken,
    peer_in_words,
    peer_of,
    resident_bytes,
    shut_down,
)
from headrace.schemas.peers.handshakes import BROKEN_OFF, DISCONNECTED, PROTOCOL, read_event
from headrace.schemas.peers.message_budget import MessageBudget
from headrace.schemas.peers.peer_account import PeerAccount

log = logging.getLogger(__name__)

ACCEPTED, CLOSED, STOPPED = 0x0020, 0x0080, 0x0400
"""libzmq's events ACCEPTED, CLOSED and MONITOR_STOPPED."""
WATCH_EVENTS = ACCEPTED | CLOSED | DISCONNECTED | BROKEN_OFF | PROTOCOL | STOPPED
"""The events that the monitor of a watched socket must report."""

UNFINISHED_S, SLOWEST_BYTES_S = 60.0, 100_000
"""A message may take so many seconds to arrive, and longer if it comes at this rate on average."""
STRANGE_MESSAGES = 64
"""Messages of a stranger after which its connection ends."""
EMPTY_MESSAGES = 4
"""Empty messages of a stranger after which its connection ends at once. No peer of any version sends one, and libzmq
reads zeros as such messages, 131,072 in 256 KiB.
"""
LEFT_BURST, LEFT_PER_S = 4096, 500.0
"""Messages of connections that have ended which are still read: at once, and in each second. Further ones are dropped
unread. Their senders are gone: what they had said and was not acknowledged is repeated, or told by their recorders.
"""
STRANGER_BYTES, STRANGERS_BYTES = 2 << 20, 16 << 20
"""The most that one stranger may send in all, and hold at a time, and that all strangers together may hold. They have
only a HELLO to say, and its header has 1 MiB at most.
"""
UNREAD_MESSAGES = 2048
"""The most small messages that may wait of one peer, at a port whose peers send most of theirs in answer to one. A
client that connects again repeats the steps of all its episodes, 1,024 at most.
"""
FEW_MESSAGES, COUNTED_MESSAGES = 64, 1024
"""A port counts what waits of a peer after so many of its messages, and looks back over so many at most."""
MOST_UNREAD_BYTES = 4 << 20
"""Bytes that a peer may leave unread, and still be sent a further message. A client reads each answer in time."""
STRANGERS = 1024
"""Strangers at one port. Beyond that number the oldest is cut. A few may stay: a fleet's supervisor is silent until it
has something to say.
"""

_FASTEST_LOOK_S, _FAST_LOOK_S, SLOW_LOOK_S, LOOK_AT_ALL_S = 0.002, 0.05, 0.25, 4.0
"""Seconds between two looks: while strangers send; at strangers, and at peers that hold much; at peers that hold
something; at all.
"""
_GROWN_BYTES = 16 << 20
"""A growth of this process since it looked at all peers, after which it looks at all again at its next slow look."""
_REST_RATIO = 4
"""While strangers send, the watch rests so many times as long as it looks."""
_MUCH_BYTES = 1 << 20
_FREE_BYTES_S = 256
"""Bytes that a connection may receive in a second in addition to messages: heartbeats of the protocol."""
_GREETING_BYTES = 4096
"""Bytes that a connection may receive before its first message: the handshake."""
_TINY_FRAMES_RATIO, _TINY_FRAMES_BYTES = 4, 64 << 20
"""An unfinished message is refused if the process grew by more than the first times its size and the second. A frame of
two bytes on the wire takes 64 in libzmq's queue, and TCP_INFO counts only bytes.
"""
_MOST_ROUTES = 1 << 14
"""Cut connections of which the watch remembers the route. What a forgotten one had sent is read like that of others."""
_BURST = 512
_FD = 14
"""libzmq's option of a socket: a descriptor that is readable when the socket has news."""


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

    def get(self, option: int) -> int | bytes:
        """Return an option of the socket."""

    def close(self, linger: int) -> None:
        """Close the monitor's end."""


@dataclass(frozen=True, slots=True)
class PortBounds:
    """The bounds of one port. Sizes in bytes."""

    connections: int
    message_bytes: int = DEFAULT_LIMITS.payload_bytes
    """The largest message: more must not be held by one connection as an unfinished message, or by all strangers."""
    held_bytes: int = 1 << 30
    """The most that all connections hold together."""
    admits_all: bool = False
    """True for a port whose peers send no messages: none is a stranger."""


@dataclass(slots=True, eq=False)
class _Connection:
    fd: int
    peer: tuple[str, int]
    since: float
    received: int = 0
    """Bytes that had come at the last look."""
    taken: int = 0
    base: int = 0
    """Bytes of them that are in whole messages, and were taken."""
    held: int = 0
    held_before: int = 0
    """`held` at the look before, if no message was taken since and the port was empty meanwhile; else 0."""
    began: float = 0.0
    """Time at which it began to hold what it holds."""
    began_rss: int = 0
    began_taken: int = 0
    cut: bool = False


class PortWatch:
    """Watches one bound socket, which the caller has given a monitor, from a thread of its own until `close`.

    `heard`, `count_unread`, `strange`, `spoke`, `refused`, `gone`, `left`, `drops` and `emptied` are called by the
    thread that receives from the socket. `on_failed_handshake` is called with (event, value) in the watch's thread.
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
        self._strangers: dict[int, _Connection] = {}
        self._wakes = select.epoll() if hasattr(select, "epoll") else None
        """Wakes the watch when the monitor has news, or bytes of a stranger come."""
        if self._wakes is not None:
            self._wakes.register(int(monitor.get(_FD)), select.EPOLLIN)
        self._rest_s = _FASTEST_LOOK_S
        """Seconds from a look to the next one, whatever comes."""
        self._accounts: dict[int, PeerAccount] = {}
        """By descriptor, of the connection that had it last."""
        self._by_route: dict[bytes, PeerAccount] = {}
        """The same accounts, and those of connections that have ended."""
        self._ended: dict[bytes, None] = {}
        """Routes of connections that have ended, the one that ended first in front."""
        self._disconnected: deque[bytes] = deque()
        """Routes of connections that have ended, for the thread that receives."""
        self._left_over = MessageBudget(LEFT_BURST, LEFT_PER_S, LEFT_BURST)
        """The messages of all connections that have ended."""
        self.over: dict[bytes, None] = {}
        """Routes of strangers that are cut or gone, and of peers that are cut for a flood, the oldest first. libzmq
        still hands out what they had sent; the thread that receives drops it.
        """
        self._taken_in_all = 0
        self._emptied = 0
        self._emptied_seen = 0
        self._to_cut: deque[tuple[int, tuple[str, int], str]] = deque()
        self._to_count: deque[tuple[int, tuple[str, int], str]] = deque()
        self.admission = Admission()
        self._slow_at = self._all_at = 0.0
        self._rss_before = 0
        self._thread = threading.Thread(target=self._run, name=f"watch of {name}", daemon=True)
        self._thread.start()

    # -- for the thread that receives ---------------------------------------------------------------------------------

    def heard(self, fd: int, route: bytes, nbytes: int) -> PeerAccount:
        """Count a whole message of the connection at `fd`, which `source_of` knows. Return the account."""
        account = self._by_route.get(route)
        if account is None:
            self._note_disconnected()
            account = self._by_route[route] = PeerAccount(route, base=(0, 0, 0, self._emptied))
            self._place(fd, account)
        account.taken += nbytes
        account.messages += 1
        account.fd = fd
        self._taken_in_all += nbytes
        if not account.known:
            account.peer = peer_of(fd)
            if account.peer is None and TELLS_PEERS:
                self.left(route)
        return account

    def count_unread(self, fd: int, account: PeerAccount) -> None:
        """Cut a known peer of which more than `UNREAD_MESSAGES` wait, though the port takes them.

        Call it after a message of a kind of which an honest peer sends few without an answer. The kernel counts bytes:
        what has come and is unread is divided by the mean size of what was taken meanwhile. One large message that is
        under way looks the same once, but not after further messages before it.
        """
        if account.messages - account.counted < FEW_MESSAGES:
            return
        account.counted = account.messages
        received = bytes_received(fd)
        messages, came, taken, emptied = account.base
        count, nbytes = account.messages - messages, account.taken - taken
        if emptied != self._emptied or count > COUNTED_MESSAGES:
            account.base, account.is_ahead = (account.messages, received, account.taken, self._emptied), False
            return
        was_ahead, account.is_ahead = account.is_ahead, (received - came - nbytes) * count > UNREAD_MESSAGES * nbytes
        if was_ahead and account.is_ahead:
            self._cut_at_once(fd, account, f"more than {UNREAD_MESSAGES} messages at a time")

    def _place(self, fd: int, account: PeerAccount) -> None:
        """Give the descriptor to a route's account, unless a newer connection has it. libzmq counts routes upwards.

        The connection that had it before has ended.
        """
        other = self._accounts.get(fd)
        if other is not None and other.route > account.route:
            self.left(account.route)
            return
        self._accounts[fd] = account
        if other is not None:
            self.left(other.route)

    def _note_disconnected(self) -> None:
        while self._disconnected:
            self.left(self._disconnected.popleft())

    def left(self, route: bytes) -> None:
        """Note that a connection has ended. What it had sent before is read as far as `LEFT_BURST` allows."""
        self._ended[route] = None
        while len(self._ended) > _MOST_ROUTES:
            first = next(iter(self._ended))
            del self._ended[first]
            self._by_route.pop(first, None)

    def drops(self, route: bytes) -> bool:
        """Return whether the next message of a route is dropped unread. Call it once for each message."""
        self._note_disconnected()
        if route in self.over:
            return True
        if route not in self._ended or self._left_over.spend():
            return False
        self.admission.be_wary()
        return True

    def emptied(self) -> None:
        """Note that no whole message waits at the socket."""
        self._emptied += 1
        self.admission.is_behind = False

    def behind(self) -> None:
        """Note that messages wait at the socket although many were taken."""
        self.admission.is_behind = True

    def strange(self, fd: int, account: PeerAccount, nbytes: int) -> None:
        """Count a message of a peer that has not introduced itself, after it was answered. Cut one that sends too many.

        A peer that sends empty messages, or was known, is cut at once: in the time of a look, libzmq makes thousands of
        them. Others are cut at the next look, so that the answers leave before.
        """
        account.strange += 1
        account.strange_bytes += nbytes
        account.empty += not nbytes
        if account.peer is None or account.route in self.over:
            return
        many = account.strange == STRANGE_MESSAGES or account.strange_bytes > STRANGER_BYTES
        if account.empty == EMPTY_MESSAGES or (many and account.was_known):
            self.admission.be_wary()
            self.end(fd, account.peer, "messages without HELLO" if many else "empty messages")
        elif many:
            self._to_cut.append((fd, account.peer, "messages without HELLO"))
        else:
            return
        self.gone(account.route)

    def spoke(self, fd: int, account: PeerAccount, cost: float) -> None:
        """Count a message of a known peer that cost so much and brought nothing new. Cut one that sends too many."""
        if not account.idle.spend(cost):
            self._cut_at_once(fd, account, "too many messages that bring nothing new")

    def _cut_at_once(self, fd: int, account: PeerAccount, why: str) -> None:
        """Cut a known peer that floods the port. For a while the port admits few new peers."""
        if account.peer is not None and account.route not in self.over:
            self.admission.be_wary()
            self.end(fd, account.peer, why)
            self.gone(account.route)

    def refused(self, fd: int, account: PeerAccount, cost: float = 1.0) -> None:
        """Count a message that was refused, and cost so much. A peer whose messages are refused too often is cut.

        A known peer is cut at once, since it has had many answers. A stranger is cut at the next look, so that its
        answers leave before.
        """
        if account.refusals.spend(cost) or account.peer is None or account.route in self.over:
            return
        if account.known:
            self.admission.be_wary()
            self.end(fd, account.peer, "refused messages")
        else:
            self._to_cut.append((fd, account.peer, "refused messages"))
        self.gone(account.route)

    def may_send(self, route: bytes, nbytes: int) -> bool:
        """Return whether to send so many bytes to a peer, and count them. It must not leave too much unread.

        libzmq bounds the number of messages that wait for a peer, not their bytes. Encryption and frames add to what
        the kernel counts, so what it has taken may be more than was sent.
        """
        account = self._by_route.get(route)
        if account is None:
            return True
        if account.sent - account.seen_taken > MOST_UNREAD_BYTES:
            taken = bytes_taken(account.fd)
            account.seen_taken = account.sent if taken is None else taken
            account.sent = max(account.sent, account.seen_taken)
            if account.sent - account.seen_taken > MOST_UNREAD_BYTES:
                return False
        account.sent += nbytes
        return True

    def gone(self, route: bytes) -> None:
        """Note that a connection has ended, of a stranger or one that was cut. What it had sent before is dropped."""
        self.over[route] = None
        if len(self.over) > _MOST_ROUTES:
            del self.over[next(iter(self.over))]

    def close(self, socket: Watched) -> None:
        """Stop the monitor of `socket`, the one that is watched, and wait for the end of the watch."""
        socket.disable_monitor()
        self._thread.join()

    def end(self, fd: int, peer: tuple[str, int], why: str) -> None:
        """End the connection at `fd` if it still is that of `peer`, a result of `peer_of`.

        The peer gets no further message.
        """
        if shut_down(fd, peer):
            self._to_count.append((fd, peer, why))

    # -- the watch ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._take_events(self._pause_s()):
                began = time.monotonic()
                self._try(self._look, began)
                took = time.monotonic() - began
                self._rest_s = min(max(_FASTEST_LOOK_S, _REST_RATIO * took), _FAST_LOOK_S)
        except Exception:
            log.exception(
                "the watch of the %s port has ended: nothing bounds its connections until a restart", self._name
            )
        finally:
            if self._wakes is not None:
                self._wakes.close()
            self._monitor.close(0)

    def _try(self, part: Callable[..., None], *args: Any, **named: Any) -> None:
        """Do a part of the watch. An error in it is logged, and must not end the bounds of the port."""
        try:
            part(*args, **named)
        except Exception as error:  # noqa: BLE001
            self._warnings.failed(f"the watch of the {self._name} port failed once, and goes on", error)

    def _pause_s(self) -> float:
        busy = self._strangers or self._to_cut or any(c.held > _MUCH_BYTES for c in self._connections.values())
        return _FAST_LOOK_S if busy else SLOW_LOOK_S

    def _take_events(self, wait_s: float) -> bool:
        """Take what the monitor says within `wait_s`, a burst at most. Return False once the monitor has ended."""
        if self._wakes is not None:
            time.sleep(self._rest_s)
            self._wakes.poll(wait_s - self._rest_s)
            wait_s = 0.0
        until = time.monotonic() + wait_s
        for _ in range(_BURST):
            if not self._monitor.poll(max(0, round((until - time.monotonic()) * 1000))):
                break
            event, value = read_event(self._monitor.recv_multipart())
            if event == STOPPED:
                return False
            self._try(self._take_event, event, value)
        return True

    def _take_event(self, event: int, value: int) -> None:
        if event == ACCEPTED:
            self._admit(value)
        elif event == DISCONNECTED:
            self._forget(value)
        elif event in (BROKEN_OFF, PROTOCOL):
            self._on_failed_handshake(event, value)

    def _admit(self, fd: int) -> None:
        peer = peer_of(fd)
        if peer is None:  # it has ended already
            return
        connection = self._connections[fd] = _Connection(fd, peer, time.monotonic(), base=_GREETING_BYTES)
        if not self._bounds.admits_all:
            self._add_stranger(connection)
        if len(self._connections) > self._bounds.connections:
            first = next(iter(self._strangers.values()), connection)
            self._cut(first, f"more than {self._bounds.connections} connections")
        elif len(self._strangers) > STRANGERS:
            self._cut(next(iter(self._strangers.values())), f"more than {STRANGERS} connections without HELLO")

    def _forget(self, fd: int) -> None:
        self._strike_stranger(fd)
        self._connections.pop(fd, None)
        account = self._accounts.pop(fd, None)
        if account is not None:
            self._disconnected.append(account.route)

    def _add_stranger(self, connection: _Connection) -> None:
        """Take a connection to the strangers: it is new, or no longer known. Its bytes wake the watch."""
        self._strangers[connection.fd] = connection
        if self._wakes is not None:
            with suppress(OSError):  # it has ended already
                self._wakes.register(connection.fd, select.EPOLLIN | select.EPOLLET)

    def _strike_stranger(self, fd: int) -> None:
        """Take a connection that is known, cut or gone off the strangers. Its bytes no longer wake the watch."""
        if self._strangers.pop(fd, None) is not None and self._wakes is not None:
            with suppress(OSError):  # libzmq has closed it
                self._wakes.unregister(fd)

    def _look(self, now: float) -> None:
        while self._to_cut:
            self.end(*self._to_cut.popleft())
        while self._to_count:
            fd, peer, why = self._to_count.popleft()
            connection = self._connections.get(fd)
            if connection is not None and connection.peer == peer:
                connection.cut = True
                self._strike_stranger(fd)
            self._count(peer, why)
        emptied, self._emptied_seen = self._emptied != self._emptied_seen, self._emptied
        for connection in self._due(now):
            self._try(self._look_at, connection, now, emptied=emptied)
        most = min(STRANGERS_BYTES, self._bounds.message_bytes)
        self._judge_together(list(self._strangers.values()), most, "strangers")
        self._judge_together(list(self._connections.values()), self._bounds.held_bytes, "all connections")

    def _due(self, now: float) -> list[_Connection]:
        slow = now >= self._slow_at
        if slow:
            self._slow_at = now + SLOW_LOOK_S
            if now >= self._all_at or resident_bytes() > self._rss_before + _GROWN_BYTES:
                self._all_at, self._rss_before = now + LOOK_AT_ALL_S, resident_bytes()
                return list(self._connections.values())
        holders = (c for c in self._connections.values() if c.began and (slow or c.held > _MUCH_BYTES))
        return [*self._strangers.values(), *(c for c in holders if c.fd not in self._strangers)]

    def _look_at(self, connection: _Connection, now: float, *, emptied: bool) -> None:
        self._measure(connection, now, emptied=emptied)
        if why := self._judge(connection, now):
            self._cut(connection, why)

    def _measure(self, connection: _Connection, now: float, *, emptied: bool) -> None:
        """Read how much the connection holds.

        If a message was taken and the port was empty since, all bytes that had come at the last look were taken too.
        """
        account = self._accounts.get(connection.fd)
        taken = account.taken if account is not None else 0
        if account is not None and account.known:
            self._strike_stranger(connection.fd)
        elif account is not None and connection.fd not in self._strangers and not connection.cut:
            self._add_stranger(connection)  # it was known once
        received = bytes_received(connection.fd)
        news, connection.taken = taken - connection.taken, taken
        if news > 0:
            connection.base += news
            if emptied:
                connection.base = max(connection.base, connection.received)
        connection.held_before = connection.held if connection.began and emptied and not news else 0
        connection.received = received
        connection.held = max(0, received - connection.base)
        if connection.held <= _FREE_BYTES_S * (now - connection.since):
            connection.began = 0.0
        elif news or not connection.began:
            connection.began, connection.began_rss, connection.began_taken = now, resident_bytes(), self._taken_in_all

    def _judge(self, connection: _Connection, now: float) -> str:
        """Return why the connection must end; "" if it may stay."""
        bounds = self._bounds
        spare = _FREE_BYTES_S * (now - connection.since)
        if bounds.admits_all:
            return "bytes at a port that only sends" if connection.held > bounds.message_bytes + spare else ""
        stranger = connection.fd in self._strangers
        most = min(STRANGER_BYTES, bounds.message_bytes) if stranger else bounds.message_bytes
        if connection.held_before > most + spare:
            return f"an unfinished message of more than {most >> 20} MiB"
        if connection.held_before and now - connection.began > UNFINISHED_S + connection.held / SLOWEST_BYTES_S:
            return f"a message of which only a part came in {UNFINISHED_S:g} s"
        return ""

    def _judge_together(self, connections: Sequence[_Connection], most: int, who: str) -> None:
        """Cut connections, the one that has held bytes longest first, until the rest holds at most `most`."""
        holders = sorted((c for c in connections if c.began and not c.cut), key=lambda c: c.began)
        held = sum(c.held for c in holders)
        if holders and held > _MUCH_BYTES and self._growth(holders[0]) > _TINY_FRAMES_BYTES + _TINY_FRAMES_RATIO * held:
            held -= holders[0].held
            self._cut(holders.pop(0), "an unfinished message of many tiny frames")
        for connection in holders:
            if held <= most:
                return
            held -= connection.held
            self._cut(connection, f"{who} held more than {most >> 20} MiB of unfinished messages")

    def _growth(self, connection: _Connection) -> int:
        """Return how much this process grew since the connection began to hold, apart from messages that were taken."""
        return resident_bytes() - connection.began_rss - 2 * (self._taken_in_all - connection.began_taken)

    def _cut(self, connection: _Connection, why: str) -> None:
        """Shut the connection down and count that, unless its descriptor belongs to another connection now."""
        connection.cut = True
        self._strike_stranger(connection.fd)
        if shut_down(connection.fd, connection.peer):
            self._count(connection.peer, why)

    def _count(self, peer: tuple[str, int], why: str) -> None:
        self.cuts[why] += 1
        text = (
            f"closed a connection of {peer_in_words(peer)} at the {self._name} port: {why}; {self.cuts[why]:,} so far"
        )
        self._warnings.warn(b"", why, text)
