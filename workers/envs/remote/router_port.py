"""The port of a worker to which env hosts, or clients, connect: one ROUTER socket, by TCP with keys, or a Unix socket.

The worker answers libzmq's question whether to admit a peer (`schemas/peers/zap.py`) when it next looks at the port. So
a handshake takes until the next poll of the envs. A peer retries a handshake that takes too long.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from functools import partial

import zmq

from headrace.schemas.basics.counted_warnings import CountedWarnings
from headrace.schemas.credentials.keys import ENV_PORT, BrokerKeys
from headrace.schemas.errors import socket_folder_error
from headrace.schemas.frames.wire import DEFAULT_LIMITS, Buffer
from headrace.schemas.peers import sockets
from headrace.schemas.peers.port_watch import WATCH_EVENTS, PortWatch, connection_limit
from headrace.schemas.peers.ports import bind_to_port, check_insecure
from headrace.schemas.peers.socket_folder import SocketPlace, endpoint_of, lock_sockets
from headrace.schemas.peers.zap import ENDPOINT, judge

log = logging.getLogger(__name__)

_BURST = 256
_TURN_S, _SHORT_TURN_S = 0.02, 0.002
"""Seconds after which `receive` ends, whatever still waits: envs and clients have their turn. The turn is short once it
has brought something new, since its sender waits for what comes next.
"""
_MOST_FRAMES = DEFAULT_LIMITS.frames
_ENV_HOSTS = ("env hosts", "env_hosts_host", "env_hosts_allow_insecure")
_CLIENTS = ("clients", "serving.host", "broker.allow_insecure")
"""The peers of a port, and the settings of its host and of `allow_insecure`."""
_CONNECTIONS = 1024


class RouterPort:
    """One bound socket at `endpoint`, for one thread. Raises `ConfigError`, `PortInUseError` and `RunDirError`.

    - at: the host to bind, and its port, of which 0 takes a free one; or the place of a Unix socket.
    - keys: by TCP needed, unless `allow_insecure`.
    - domain: the ZAP domain, one for each role of peers.
    """

    def __init__(
        self,
        at: tuple[str, int] | SocketPlace,
        keys: BrokerKeys | None,
        *,
        allow_insecure: bool = False,
        domain: str = ENV_PORT,
        largest_message: int = DEFAULT_LIMITS.payload_bytes + (1 << 20),
    ) -> None:
        self._who, host_key, insecure_key = _ENV_HOSTS if domain == ENV_PORT else _CLIENTS
        self._keys = keys
        if keys is None and not isinstance(at, SocketPlace):
            check_insecure(at[0], host_key, insecure_key, allowed=allow_insecure)
        self._warnings = CountedWarnings(log)
        self._own = sockets.OwnSockets(zmq.Context(), f"a port for {self._who}", 0.2)
        self._poller = zmq.Poller()
        try:
            if isinstance(at, SocketPlace):
                lock_sockets(self._own, at.folder, at.name, [at.name])
            self._zap = self._open_zap() if keys is not None else None
            self._socket = self._open(at, domain, largest_message)
            if isinstance(at, SocketPlace):
                self._bind_in_folder(at)
            else:
                bind_to_port(self._socket.bind, *at, host_key)
        except BaseException:
            self._own.close(0.0)
            raise
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self.at = at if isinstance(at, SocketPlace) else (at[0], int(self.endpoint.rpartition(":")[2]))
        """Address to bind the next port to, in place of this one."""
        self._poller.register(self._socket, zmq.POLLIN)

    def _open_zap(self) -> zmq.Socket[bytes]:
        zap: zmq.Socket[bytes] = self._own.open(zmq.ROUTER, {})
        zap.bind(ENDPOINT)
        self._poller.register(zap, zmq.POLLIN)
        return zap

    def _open(self, at: tuple[str, int] | SocketPlace, domain: str, most: int) -> zmq.Socket[bytes]:
        keys = self._keys.options(domain) if self._keys is not None else {}
        family = {"IPC_FILTER_UID": os.geteuid()} if isinstance(at, SocketPlace) else {"IPV6": int(":" in at[0])}
        limits = {"SNDHWM": sockets.MOST_WAITING, "MAXMSGSIZE": most}
        socket: zmq.Socket[bytes] = self._own.open(zmq.ROUTER, sockets.ROUTER | limits | family | keys)
        places = connection_limit(_CONNECTIONS, ports=2)
        watch = PortWatch(self._who, self._own.monitor(socket, WATCH_EVENTS), places, by_key=bool(keys))
        self._own.before_end.append(partial(watch.close, socket))
        return socket

    def _bind_in_folder(self, at: SocketPlace) -> None:
        try:
            self._socket.bind(endpoint_of(at.folder, at.name))
        except zmq.ZMQError as error:
            raise socket_folder_error(str(at.folder), f"no socket can be made in it ({error})") from error

    @property
    def fds(self) -> list[int]:
        """Return file descriptors; one of them is readable when `wait` may have work.

        They tell of changes only. So call `wait(0)`, which must find nothing, before each sleep on them.
        """
        return [int(socket.getsockopt(zmq.FD)) for socket in (self._socket, self._zap) if socket is not None]

    def watch(self, fd: int) -> None:
        """Have `wait` also return when `fd` is readable."""
        self._poller.register(fd, zmq.POLLIN)

    def wait(self, timeout_s: float) -> bool:
        """Sleep until something comes, at most `timeout_s`. Return whether it is a message. Admit new connections."""
        speaking = False
        for socket, _ in self._poller.poll(math.ceil(max(timeout_s, 0.0) * 1000)):
            if self._zap is not None and socket is self._zap:
                self._judge(self._zap)
            else:
                speaking = True
        return speaking

    def _judge(self, zap: zmq.Socket[bytes]) -> None:
        """Take requests of handshakes, and answer each."""
        assert self._keys is not None
        for _ in range(_BURST):
            try:
                route, empty, *request = zap.recv_multipart(sockets.DONTWAIT)
            except zmq.Again:
                return
            self._keys.known.look()
            verdict = judge(request, self._keys)
            if verdict.why:
                text = f"refused at the port for {self._who}: {verdict.why} ({verdict.seen})"
                self._warnings.warn(b"", "key", text)
            zap.send_multipart([route, empty, *verdict.frames], sockets.DONTWAIT)

    def receive(
        self, most: int = _BURST, has_news: Callable[[], bool] = lambda: False
    ) -> Iterator[tuple[bytes, list[bytes]]]:
        """Yield (route, frames) of each message that waits, at most `most` or a burst. `has_news` shortens the turn."""
        began = time.monotonic()
        for _ in range(min(most, _BURST)):
            message = _receive(self._socket)
            if message is None:
                return
            yield message
            took = time.monotonic() - began
            if took > _TURN_S or (took > _SHORT_TURN_S and has_news()):
                return

    def send(self, route: bytes, frames: list[Buffer]) -> bool:
        """Send one message without waiting. Return False if the peer is gone, or too many messages wait for it."""
        try:
            more = sockets.DONTWAIT | sockets.MORE
            self._socket.send(route, more)
            for frame in frames[:-1]:
                self._send(frame, more)
            self._send(frames[-1], sockets.DONTWAIT)
        except zmq.ZMQError:  # EHOSTUNREACH: that connection has ended
            return False
        return True

    def _send(self, frame: Buffer, flags: int) -> None:
        self._socket.send(frame, flags, copy=len(frame) < sockets.COPY_BELOW_BYTES)

    def close(self) -> None:
        """Close the socket. Messages that were sent have a moment to leave."""
        self._own.close()


def _receive(socket: zmq.Socket[bytes]) -> tuple[bytes, list[bytes]] | None:
    """Return (first frame, the others), or None. Drop frames beyond any decoder's limit.

    A `Frame` knows whether more follow, which is cheaper than asking the socket.
    """
    try:
        first = socket.recv(sockets.DONTWAIT)
        frame = socket.recv(sockets.DONTWAIT, copy=False)
        frames = [frame.bytes]
        while frame.more:
            frame = socket.recv(sockets.DONTWAIT, copy=False)
            if len(frames) <= _MOST_FRAMES:
                frames.append(frame.bytes)
    except zmq.Again:  # also in the midst of one, whose beginning was lost when Ctrl-C came
        return None
    return first, frames
