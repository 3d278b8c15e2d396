"""The options, the owner and the use of every side's sockets. Schemas do not import zmq: callers give a context.

libzmq's defaults hang at exit (LINGER -1), never notice a dead peer (HEARTBEAT_IVL 0), and give a handshake half a
minute. All options must be set before bind or connect, or they have no effect.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace.schemas.basics.dropped import when_dropped
from headrace.schemas.errors import HeadraceError

MORE, DONTWAIT = 2, 1
"""Flags of libzmq as plain integers: or-ing pyzmq's enums for every frame costs as much as sending a small one."""
_FD, _EVENTS, _POLLIN = 14, 15, 1

COPY_BELOW_BYTES = 1 << 20
"""A worker copies frames below this size when it sends them. Without a copy pyzmq learns of each one's end in a thread
of its own, which takes turns of the interpreter lock from the thread that samples. The copy of a small batch is
cheaper.
"""

MOST_WAITING = 1 << 16
"""Messages that wait for a peer that does not read, where each is repeated in time: acknowledgements, orders, answers.
Later ones are dropped.
"""

COMMON: dict[str, int] = {
    "LINGER": 0,
    "HEARTBEAT_IVL": 5_000,
    "HEARTBEAT_TIMEOUT": 8_000,
    "HANDSHAKE_IVL": 5_000,
    "RECONNECT_IVL": 50,
    "RECONNECT_IVL_MAX": 1_000,
}
"""Times in milliseconds. ZMTP heartbeats tell only that the peer's I/O thread lives; the protocol has its own."""

_SERVER = COMMON | {"HEARTBEAT_IVL": 20_000, "BACKLOG": 4096}
"""Each connection has a heartbeat and its answer in each direction, which are most of what an idle broker of a thousand
workers pays for. It needs them only to close what a machine without power left open: leases end its sessions.

BACKLOG: connections that may wait to be accepted, since all workers connect at once to a broker that starts again. The
kernel drops those beyond it, and a peer tries again after a second. Linux allows `net.core.somaxconn` at most.
"""

DEALER: dict[str, int] = COMMON | {"SNDHWM": 0, "RCVHWM": 0, "IMMEDIATE": 1, "IPV6": 1}
"""Unbounded at the socket, since windows and credit bound what is sent. IMMEDIATE: without a connection a send fails at
once, and does not fill a queue of old messages for a later peer. IPV6 allows both kinds of address. A server sets it
for IPv6 hosts only, or IPv4 endpoints would be written in IPv6 form.
"""

ROUTER: dict[str, int] = _SERVER | {"SNDHWM": 0, "RCVHWM": 0, "ROUTER_MANDATORY": 1}
"""MANDATORY: a message for a peer that has gone raises an error and is not dropped silently.

RCVHWM 0: at a bound libzmq 4.3.5 stops to read from a peer, and its connection may be reset meanwhile. A ping that is
then due, or among what the peer has sent, ends the process ("Assertion failed: !_io_error").
"""

_KEEPALIVE: dict[str, int] = {
    "HEARTBEAT_IVL": 0,
    "TCP_KEEPALIVE": 1,
    "TCP_KEEPALIVE_IDLE": 20,
    "TCP_KEEPALIVE_INTVL": 5,
    "TCP_KEEPALIVE_CNT": 3,
}
"""The kernel looks for a dead peer (times in seconds). A SUB stops to read at its RCVHWM, where a ping may end its
process.
"""

XPUB: dict[str, int] = _SERVER | _KEEPALIVE | {"SNDHWM": 4, "RCVHWM": 0, "XPUB_VERBOSE": 1}
"""A slow subscriber misses versions and delays no other. Heartbeats tell it of the newest version, which it pulls.
VERBOSE: the broker learns of every new subscriber and sends the last version again.
"""

SUB: dict[str, int] = COMMON | _KEEPALIVE | {"RCVHWM": 4, "IPV6": 1}
"""Few versions wait: each is applied between two steps or replaced by a newer one. Where its connection is lost without
a sign, a worker learns of new versions by its session, and pulls them.
"""


def send(socket: Any, frames: Sequence[Any]) -> None:
    """Send one message without waiting, its large frames without a copy. Raises pyzmq's errors.

    Frames that were received go out again without a copy.
    """
    for frame in frames[:-1]:
        socket.send(frame, MORE | DONTWAIT, copy=False)
    socket.send(frames[-1], DONTWAIT, copy=False)


def receive(dealer: Any) -> list[memoryview] | None:
    """Return the frames of a DEALER's next message, or a SUB's; None if there is none, or if its connection ended.

    They are read-only views that keep the message's memory. Raises pyzmq's errors, `zmq.Again` among them where the
    connection ends in the midst of the message.
    """
    if not has_message(dealer):
        return None
    frame = dealer.recv(DONTWAIT, copy=False)
    frames = [frame.buffer]
    while frame.more:
        frame = dealer.recv(DONTWAIT, copy=False)
        frames.append(frame.buffer)
    return frames


def has_message(dealer: Any) -> bool:
    """Return whether a message waits in a DEALER with IMMEDIATE. Ask before each message that is read.

    When a connection ends, libzmq drops what such a socket has received and nobody has read. It notes the end when it
    is asked for events, and at each hundredth frame that is read. Noted in the midst of a message, the end aborts the
    process ("Assertion failed: !_more").
    """
    return bool(dealer.get(_EVENTS) & _POLLIN)


def watch(socket: Any, poller: Any) -> bool:
    """Let a poller wait for the next message of a socket. Return whether one has come already.

    The poller gets the file descriptor, so that another thread may use the socket during the wait. A message that it
    receives is no event any more.
    """
    poller.register(socket.get(_FD), _POLLIN)
    return has_message(socket)


EndCalls = list[Callable[[], None]]


class OwnSockets:
    """The ZeroMQ sockets of one object, in a `context` of their own. They close with `close`, or when it is dropped.

    An object is dropped without `close` where a function raises, or a notebook's cell runs again. Its sockets then
    close as `when_dropped` says, and what they have sent has `linger_s` to leave. By themselves they would stay open,
    and libzmq waits for ever for the end of a context with open sockets: before Python ends the objects of a cycle, it
    clears the weak references by which pyzmq's context knows its sockets.

    - name: what is dropped, for the warning.
    """

    def __init__(self, context: Any, name: str, linger_s: float) -> None:
        self._name, self._process = name, os.getpid()
        self._context, self._linger_ms = context, int(linger_s * 1000)
        self._open: list[Any] = []
        self.before_end: EndCalls = []
        self.after_end: EndCalls = []
        """Calls before and after the sockets close. They must not hold the object that has the sockets."""
        parts = context, self._open, self.before_end, self.after_end, self._linger_ms
        self._dropped = when_dropped(self, f"{name} was dropped without close()", _end, *parts)

    def open(self, kind: int, options: Mapping[str, Any]) -> Any:
        """Return a new socket with these options, which is not connected yet."""
        socket = self.keep(self._context.socket(kind))
        for name, value in options.items():
            setattr(socket, name.lower(), value)
        return socket

    def monitor(self, socket: Any, events: int) -> Any:
        """Return the socket that tells these events of another one."""
        return self.keep(socket.get_monitor_socket(events))

    def keep(self, socket: Any) -> Any:
        """Close this socket too, and return it."""
        self._open[:] = [other for other in self._open if not other.closed]
        self._open.append(socket)
        return socket

    @property
    def usable(self) -> bool:
        """Return whether the sockets are open, and of this process."""
        return self._dropped.alive and self._process == os.getpid()

    def check(self) -> None:
        """Raise `HeadraceError` where the sockets are not `usable`: libzmq would wait for ever in a copy by `fork`."""
        if self._process != os.getpid():
            raise HeadraceError(
                f"{self._name} is of process {self._process}, and this is a copy of it by fork ({os.getpid()}); open "
                "another one here, or use it there only"
            )
        if not self._dropped.alive:
            raise HeadraceError(f"{self._name} is closed; open another one")

    def close(self, linger_s: float | None = None) -> None:
        """Close all sockets. What they have sent has `linger_s` to leave; None: as long as of a dropped one."""
        if self.usable and self._dropped.detach() is not None:
            linger_ms = self._linger_ms if linger_s is None else int(linger_s * 1000)
            _end(self._context, self._open, self.before_end, self.after_end, linger_ms)


def _end(context: Any, sockets: list[Any], before_end: EndCalls, after_end: EndCalls, linger_ms: int) -> None:
    while before_end:
        before_end.pop()()
    for socket in sockets:
        socket.close(linger_ms)
    context.term()
    while after_end:
        after_end.pop()()
