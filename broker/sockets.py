"""The broker's three sockets: ROUTER for workers, ROUTER for learners, XPUB for weights."""

from __future__ import annotations

import errno
import ipaddress
import logging

import zmq

from headrace.broker.state_file import Endpoints
from headrace.schemas import sockets
from headrace.schemas.config import BrokerSection
from headrace.schemas.errors import ConfigError, PortInUseError

log = logging.getLogger(__name__)

Socket = zmq.Socket[bytes]


class BrokerSockets:
    """Bound sockets and where they listen. Raises `PortInUseError`, or `ConfigError` for a host that is not ours."""

    def __init__(self, config: BrokerSection, before: Endpoints | None) -> None:
        _check_host(config)
        self._context = zmq.Context()
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
        for name, value in (options | limits).items():
            socket.setsockopt(getattr(zmq, name), value)
        address = f"tcp://{_bracketed(config.host)}"
        if port == 0 and before is not None:
            port = int(getattr(before, role).rpartition(":")[2])
        endpoint = f"{address}:{port or '*'}"
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortInUseError(endpoint) from error
            raise ConfigError(f"{config.host!r} cannot be bound: {error}", key="broker.host") from error
        return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def close(self) -> None:
        """Close all; what was sent has half a second to leave."""
        self._context.destroy(linger=500)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _check_host(config: BrokerSection) -> None:
    """Off loopback nothing encrypts the fleet's traffic yet, so that must be asked for by name."""
    try:
        local = ipaddress.ip_address(config.host.strip("[]")).is_loopback
    except ValueError:
        local = config.host == "localhost"
    if local:
        return
    if not config.allow_insecure:
        raise ConfigError(
            f"{config.host} is reachable from other machines and the traffic is not encrypted; bind loopback, "
            "or set broker.allow_insecure = true on a network you trust",
            key="broker.host",
        )
    log.warning("serving %s without encryption or authentication, since broker.allow_insecure = true", config.host)
