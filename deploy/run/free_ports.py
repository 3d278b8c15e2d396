"""Free ports side by side, one for each worker, known before the workers start and fixed over their lives."""

from __future__ import annotations

import errno
import random
import socket

from headrace.schemas.errors import ConfigError, PortInUseError
from headrace.schemas.peers.ports import HIGHEST, LOWEST, quiet_ports
from headrace.schemas.settings.config import FleetConfig

_ROOM = 2000
"""Ports kept above the first, for workers that are started alone: the broker gives them slots from 1000 on."""
_TRIES = 64


def first_of_free(host: str, workers: int, who: str, key: str, *, never: int = 0) -> int:
    """Return the lowest of `workers` ports in a row that are free at `host`, apart from those that begin at `never`.

    Raises `ConfigError` with `key` for a host that cannot be bound, `PortInUseError` where no ports are free.
    """
    tries = random.sample(range(LOWEST, HIGHEST - _ROOM), _TRIES)
    for first in (port for port in [*quiet_ports(), *tries] if port + _ROOM <= HIGHEST):
        away = not never or abs(first - never) >= workers
        if away and all(_is_free(host, first + slot, key) for slot in range(workers)):
            return first
    raise PortInUseError(f"each of {2 * _TRIES} ports tried on {host} for {who}")


def check_ports(config: FleetConfig) -> None:
    """Check the ports that the config fixes. Raises `PortInUseError`, or `ConfigError` for a host that is not ours."""
    broker, sampling, serving, workers = config.broker, config.sampling, config.serving, config.fleet.workers
    for name in ("worker_port", "learner_port", "weights_port"):
        _check(broker.host, getattr(broker, name), 1, "broker.host")
    if sampling.env_placement == "remote":
        _check(sampling.env_hosts_host, sampling.env_hosts_port, workers, "sampling.env_hosts_host")
    if serving.enabled:
        for port in (serving.port, serving.http_port or 0):
            _check(serving.host, port, workers, "serving.host")


def _check(host: str, first: int, count: int, key: str) -> None:
    for port in range(first, first + count) if first else ():
        if not _is_free(host, port, key):
            raise PortInUseError(f"tcp://{host}:{port}")


def _is_free(host: str, port: int, key: str) -> bool:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return False
        raise ConfigError(f"{host!r} cannot be bound: {error.strerror}", key=key) from error
    return True
