"""The port of a worker to which env hosts, or clients, connect: one ROUTER socket, with keys or without.

libzmq asks for each new CURVE connection whether to let it in (ZAP, ZeroMQ RFC 27). The worker answers when it next
looks at the port. So a handshake takes until the next poll of the envs; a peer retries one that takes too long.
"""

from __future__ import annotations

import errno
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

from headrace.schemas import sockets
from headrace.schemas.config import is_loopback
from headrace.schemas.errors import ConfigError, PortInUseError
from headrace.schemas.keys import ENV_PORT, BrokerKeys, client_keys, read_env_port_keys
from headrace.schemas.ports import quiet_ports
from headrace.schemas.wire import DEFAULT_LIMITS, Buffer

log = logging.getLogger(__name__)

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_BURST = 256


@dataclass(frozen=True, slots=True)
class RouterPortSettings:
    """The address and the keys of a port."""

    host: str
    port: int
    """0 takes a free one."""
    keys: BrokerKeys | None
    allow_insecure: bool = False
    domain: str = ENV_PORT
    """The ZAP domain, one for each role."""
    who: str = "env hosts"
    setting: str = "env_hosts"
    """Prefix of the names of the port's settings."""
    largest_frame: int = DEFAULT_LIMITS.payload_bytes + (1 << 20)


def env_port_keys(folder: str | None) -> BrokerKeys | None:
    """Return the keys of the port in `folder`. None means HEADRACE_KEYS__DIR; "", or no keys there, means None."""
    keys = client_keys(folder, "worker") if folder != "" else None
    return read_env_port_keys(Path(keys.folder)) if keys is not None else None


class RouterPort:
    """One bound socket at `endpoint`, for one thread. Raises `ConfigError` and `PortInUseError`."""

    def __init__(self, settings: RouterPortSettings) -> None:
        _check_host(settings)
        self._keys = settings.keys
        self._who = settings.who
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        try:
            self._zap = self._open_zap() if self._keys is not None else None
            self._socket, self.endpoint = self._bind(settings)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._poller.register(self._socket, zmq.POLLIN)

    def _open_zap(self) -> zmq.Socket[bytes]:
        zap: zmq.Socket[bytes] = self._context.socket(zmq.REP)
        zap.bind(_ZAP_ENDPOINT)
        self._poller.register(zap, zmq.POLLIN)
        return zap

    def _bind(self, settings: RouterPortSettings) -> tuple[zmq.Socket[bytes], str]:
        socket = self._context.socket(zmq.ROUTER)
        keys = settings.keys.options(settings.domain) if settings.keys is not None else {}
        options = sockets.ROUTER | {"MAXMSGSIZE": settings.largest_frame, "IPV6": int(":" in settings.host)}
        for name, value in (options | keys).items():
            socket.setsockopt(getattr(zmq, name), value)
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        for candidate in [settings.port] if settings.port else [*quiet_ports(), "*"]:
            endpoint = f"tcp://{host}:{candidate}"
            try:
                socket.bind(endpoint)
                break
            except zmq.ZMQError as error:
                if error.errno != errno.EADDRINUSE:
                    message = f"{settings.host!r} cannot be bound: {error}"
                    raise ConfigError(message, key=f"{settings.setting}_host") from error
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
                self._admit(self._zap)
            else:
                speaking = True
        return speaking

    def _admit(self, zap: zmq.Socket[bytes]) -> None:
        assert self._keys is not None
        for version, (request, _, address, _, mechanism, *shown) in _received(zap):
            public = z85.encode(shown[0]) if mechanism == b"CURVE" and shown else b""
            if public in self._keys.roles:
                zap.send_multipart([version, request, b"200", b"OK", self._keys.roles[public].encode(), b""])
            else:
                seen = f"{public[:8].decode()}... from {address.decode(errors='replace')}"
                log.warning("refused at the port for %s: an unknown key (%s)", self._who, seen)
                zap.send_multipart([version, request, b"400", b"unknown key", b"", b""])

    def receive(self, most: int = _BURST) -> Iterator[tuple[bytes, list[bytes]]]:
        """Yield (route, frames) of each message that waits, at most `most` or a burst."""
        return _received(self._socket, min(most, _BURST))

    def send(self, route: bytes, frames: list[Buffer]) -> bool:
        """Send one message without waiting. Return False if the peer is gone."""
        try:
            more = sockets.DONTWAIT | sockets.MORE
            self._socket.send(route, more)
            for frame in frames[:-1]:
                self._send(frame, more)
            self._send(frames[-1], sockets.DONTWAIT)
        except (zmq.Again, zmq.ZMQError):  # EHOSTUNREACH: that connection has ended
            return False
        return True

    def _send(self, frame: Buffer, flags: int) -> None:
        self._socket.send(frame, flags, copy=len(frame) < sockets.COPY_BELOW_BYTES)

    def close(self) -> None:
        """Close the socket. Messages that were sent have a moment to leave."""
        self._context.destroy(linger=200)


def _received(socket: zmq.Socket[bytes], most: int = _BURST) -> Iterator[tuple[bytes, list[bytes]]]:
    """Yield (first frame, the others). A `Frame` knows whether more follow, which is cheaper than asking the socket."""
    for _ in range(most):
        try:
            first, frames, more = socket.recv(sockets.DONTWAIT), [], True
            while more:
                frame = socket.recv(sockets.DONTWAIT, copy=False)
                frames.append(frame.bytes)
                more = frame.more
        except zmq.Again:  # also in the midst of one, whose beginning was lost when Ctrl-C came
            return
        yield first, frames


def _check_host(settings: RouterPortSettings) -> None:
    if settings.keys is not None or is_loopback(settings.host):
        return
    if not settings.allow_insecure:
        raise ConfigError(
            f"{settings.host} is reachable from other machines, and there are no keys; name their folder in keys.dir "
            "(`headrace keys init` makes them), listen on loopback, or set "
            f"{settings.setting}_allow_insecure = true on a network you trust",
            key=f"{settings.setting}_host",
        )
    log.warning("serving %s on %s without encryption or authentication, as configured", settings.who, settings.host)
