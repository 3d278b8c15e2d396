"""The port of a worker to which env hosts, or clients, connect: one ROUTER socket, with keys, with a token, or without.

The worker answers libzmq's question whether to admit a peer (`schemas/peers/zap.py`) when it next looks at the port. So
a handshake takes until the next poll of the envs. A peer retries a handshake that takes too long.
"""

from __future__ import annotations

import errno
import logging
import math
import time
from collections.abc import Callable, Iterator
from functools import partial

import zmq

from headrace.schemas.basics.counted_warnings import CountedWarnings
from headrace.schemas.credentials.keys import ENV_HOST, ENV_PORT, BrokerKeys, keys_folder, port_keys
from headrace.schemas.credentials.loopback_token import ServerToken
from headrace.schemas.errors import ConfigError, PortInUseError
from headrace.schemas.frames.wire import DEFAULT_LIMITS, Buffer
from headrace.schemas.peers import sockets
from headrace.schemas.peers.advertised import in_url
from headrace.schemas.peers.connection_limit import connection_limit
from headrace.schemas.peers.port_listing import PortListing
from headrace.schemas.peers.port_watch import WATCH_EVENTS, PortWatch
from headrace.schemas.peers.ports import ports_to_try
from headrace.schemas.peers.zap import ENDPOINT, judge
from headrace.schemas.settings.config import is_loopback

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


def env_port_keys(folder: str | None, group: str | None = None) -> BrokerKeys | ServerToken | None:
    """Return the keys of the port in `folder`, for a worker of `group`, or the token of the run there.

    None means HEADRACE_KEYS__DIR, or HEADRACE_KEYS__GROUP. A folder of "", or no keys there, means None.
    """
    found = keys_folder(folder)
    return port_keys(found, ENV_HOST, group) if found is not None else None


class RouterPort:
    """One bound socket at `endpoint`, for one thread. Raises `ConfigError` and `PortInUseError`.

    - port: 0 takes a free one.
    - keys: a token counts on loopback only, and not with `allow_insecure`.
    - domain: the ZAP domain, one for each role of peers.
    """

    def __init__(
        self,
        host: str,
        port: int,
        keys: BrokerKeys | ServerToken | None,
        *,
        allow_insecure: bool = False,
        domain: str = ENV_PORT,
        largest_message: int = DEFAULT_LIMITS.payload_bytes + (1 << 20),
    ) -> None:
        self._who, self._host_key, insecure_key = _ENV_HOSTS if domain == ENV_PORT else _CLIENTS
        is_open = allow_insecure or not is_loopback(host)
        self._keys = None if is_open and isinstance(keys, ServerToken) else keys
        if self._keys is None and is_loopback(host):
            if keys is not None:
                log.warning("serving %s of every user of this machine without a token, as configured", self._who)
        elif self._keys is None and not allow_insecure:
            raise ConfigError(
                f"{host} is reachable from other machines, and there are no keys; name their folder in keys.dir "
                f"(`headrace keys init` makes them), listen on loopback, or set {insecure_key} = true on a network you "
                "trust",
                key=self._host_key,
            )
        elif self._keys is None:
            log.warning("serving %s on %s without encryption or authentication, as configured", self._who, host)
        self._listing = PortListing((), "")
        self._warnings = CountedWarnings(log)
        self._own = sockets.OwnSockets(zmq.Context(), f"a port for {self._who}", 0.2)
        self._poller = zmq.Poller()
        try:
            self._zap = self._open_zap() if self._keys is not None else None
            self._socket, self.endpoint = self._bind(host, port, domain, largest_message)
        except BaseException:
            self._own.close(0.0)
            raise
        self._poller.register(self._socket, zmq.POLLIN)
        if isinstance(self._keys, ServerToken):
            self._listing = PortListing([self.endpoint], self._keys.word)

    def _open_zap(self) -> zmq.Socket[bytes]:
        zap: zmq.Socket[bytes] = self._own.open(zmq.ROUTER, {})
        zap.bind(ENDPOINT)
        self._poller.register(zap, zmq.POLLIN)
        return zap

    def _bind(self, host: str, port: int, domain: str, most: int) -> tuple[zmq.Socket[bytes], str]:
        keys = self._keys.options(domain) if self._keys is not None else {}
        limits = {"SNDHWM": sockets.MOST_WAITING, "MAXMSGSIZE": most}
        options = sockets.ROUTER | limits | {"IPV6": int(":" in host)}
        socket: zmq.Socket[bytes] = self._own.open(zmq.ROUTER, options | keys)
        places = connection_limit(_CONNECTIONS, ports=2)
        watch = PortWatch(self._who, self._own.monitor(socket, WATCH_EVENTS), places)
        self._own.before_end(partial(watch.close, socket))
        for candidate in ports_to_try(port):
            endpoint = f"tcp://{in_url(host)}:{candidate}"
            try:
                socket.bind(endpoint)
                break
            except zmq.ZMQError as error:
                if error.errno != errno.EADDRINUSE:
                    raise ConfigError(f"{host!r} cannot be bound: {error}", key=self._host_key) from error
        else:
            raise PortInUseError(endpoint)
        return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

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
            if isinstance(self._keys, BrokerKeys):
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
        self._listing.remove()
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
