"""The broker's three sockets: ROUTER for workers, ROUTER for learners, XPUB for weights."""

from __future__ import annotations

import errno
import logging
from typing import Any

import zmq

from headrace.broker.state_file import Endpoints
from headrace.broker.zap_auth import ZapAuthenticator
from headrace.schemas import sockets
from headrace.schemas.config import BrokerSection, is_loopback
from headrace.schemas.errors import ConfigError, PortInUseError
from headrace.schemas.keys import BrokerKeys
from headrace.schemas.ports import quiet_ports

log = logging.getLogger(__name__)

Socket = zmq.Socket[bytes]


class BrokerSockets:
    """The bound sockets, their endpoints, and the authenticator of their peers.

    Raises `PortInUseError`. Raises `ConfigError` for a host that is not this machine's, or one open to others without
    keys.
    """

    def __init__(self, config: BrokerSection, before: Endpoints | None, keys: BrokerKeys | None) -> None:
        _check_host(config, keys)
        self._context = zmq.Context()
        self.auth = ZapAuthenticator(self._context, keys)
        max_frame = config.max_batch_bytes + (1 << 20)
        limits = {"MAXMSGSIZE": max_frame}
        try:
            self.workers, worker = self._bind(config, "worker", config.worker_port, before, limits)
            self.learners, learner = self._bind(config, "learner", config.learner_port, before, {})
            self.weights, weights = self._bind(config, "weights", config.weights_port, before, {})
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self.endpoints = Endpoints(worker=worker, learner=learner, weights=weights)

    def _bind(
        self, config: BrokerSection, role: str, port: int, before: Endpoints | None, limits: dict[str, int]
    ) -> tuple[Socket, str]:
        """Bind one socket: to its configured port, else to the one it had before, else to a free one."""
        kind, options = (zmq.XPUB, sockets.XPUB) if role == "weights" else (zmq.ROUTER, sockets.ROUTER)
        socket = self._context.socket(kind)
        for name, value in (options | limits | {"IPV6": int(":" in config.host)}).items():
            socket.setsockopt(getattr(zmq, name), value)
        self.auth.guard(socket, role)
        address = f"tcp://{_bracketed(config.host)}"
        if port == 0 and before is not None:
            port = int(getattr(before, role).rpartition(":")[2])
        candidates = [port] if port else [*quiet_ports(), "*"]
        for candidate in candidates:
            endpoint = f"{address}:{candidate}"
            try:
                socket.bind(endpoint)
                break
            except zmq.ZMQError as error:
                if error.errno != errno.EADDRINUSE:
                    raise ConfigError(f"{config.host!r} cannot be bound: {error}", key="broker.host") from error
        else:
            raise PortInUseError(endpoint)
        return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def close(self) -> None:
        """Close all sockets; messages already sent have half a second to leave."""
        self._context.destroy(linger=500)


def receive(socket: Socket) -> list[zmq.Frame] | None:
    """Return the next message, its frames without a copy; None if there is none."""
    try:
        frames = [socket.recv(sockets.DONTWAIT, copy=False)]
    except zmq.Again:
        return None
    while frames[-1].more:
        frames.append(socket.recv(sockets.DONTWAIT, copy=False))
    return frames


def send(socket: Socket, frames: list[Any]) -> None:
    """Send one message without waiting. Frames that were received go out again without a copy."""
    for frame in frames[:-1]:
        socket.send(frame, sockets.MORE | sockets.DONTWAIT, copy=False)
    socket.send(frames[-1], sockets.DONTWAIT, copy=False)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _check_host(config: BrokerSection, keys: BrokerKeys | None) -> None:
    """Refuse a host off loopback without keys unless `allow_insecure` is set: any machine could connect and listen."""
    if keys is not None or is_loopback(config.host):
        return
    if not config.allow_insecure:
        raise ConfigError(
            f"{config.host} is reachable from other machines, and there are no keys; name their folder in keys.dir "
            "(`headrace keys init` makes them), bind loopback, or set broker.allow_insecure = true on a network you "
            "trust",
            key="broker.host",
        )
    log.warning("serving %s without encryption or authentication, since broker.allow_insecure = true", config.host)
