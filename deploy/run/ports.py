"""Ports of the broker, and of each worker for env hosts and clients. They are known before the start, and stay."""

from __future__ import annotations

import errno
import logging
import random
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from headrace.broker.files.state_file import Endpoints, read_broker_file
from headrace.schemas.errors import ConfigError, PortInUseError
from headrace.schemas.peers.advertised import in_url
from headrace.schemas.peers.ports import HIGHEST, LOWEST, quiet_ports
from headrace.schemas.peers.socket_folder import endpoint_of, make_socket_folder
from headrace.schemas.settings.config import BrokerSection, FleetConfig

log = logging.getLogger("headrace.supervisor")

_ROOM = 2000
"""Ports kept above the first, for workers that are started alone: the broker gives them slots from 1000 on."""
_TRIES = 64
_MOST_HELD = 32
"""The broker serves each of these at a port of its own."""


def first_of_free(host: str, workers: int, who: str, key: str, *, never: int = 0) -> int:
    """Return the first of `workers` consecutive free ports at `host`, apart from the range that begins at `never`.

    No other `headrace up` of this machine finds them free while this process lives. Raises `ConfigError` with `key` for
    a host that cannot be bound, `PortInUseError` where no ports are free.
    """
    tries = random.sample(range(LOWEST, HIGHEST - _ROOM), _TRIES)
    for first in (port for port in [*quiet_ports(), *tries] if port + _ROOM <= HIGHEST):
        away = not never or abs(first - never) >= workers
        if away and _hold(host, range(first, first + workers), key):
            return first
    raise PortInUseError(f"each of {2 * _TRIES} ports tried on {host} for {who}")


def check_ports(config: FleetConfig) -> None:
    """Check the ports that the config fixes. Raises `PortInUseError`, or `ConfigError` for a host that is not ours."""
    broker, sampling, serving, workers = config.broker, config.sampling, config.serving, config.fleet.workers
    _check(broker.host, broker.port, len(broker.ports), "broker.host", "broker.port")
    if sampling.env_placement == "remote":
        _check(config.env_hosts_host, sampling.env_hosts_port, workers, "broker.host", "sampling.env_hosts_port")
    if serving.enabled:
        _check(serving.host, serving.port, workers, "serving.host", "serving.port")
        _check(serving.http_host, serving.http_port or 0, workers, "serving.host", "serving.http_port")


def _check(host: str, first: int, count: int, key: str, setting: str) -> None:
    for port in range(first, first + count) if first else ():
        if not is_free(host, port, key):
            raise PortInUseError(f"tcp://{host}:{port}", setting)


def is_free(host: str, port: int, key: str) -> bool:
    """Return whether a server can bind this port. Raises `ConfigError` with `key` for a host that is not ours."""
    with ExitStack() as probes:
        return _bind(host, port, key, probes, shares=True) is not None


def _hold(host: str, ports: Sequence[int], key: str) -> bool:
    """Bind these ports, or the first ones of many, until this process ends. Return False if one of them is taken.

    A socket that shares its port may be bound there too, as those of servers are: nothing listens at the ones held.
    """
    held: list[socket.socket] = []
    with ExitStack() as probes:
        for port in ports:
            probe = _bind(host, port, key, probes, shares=False)
            if probe is None:
                return False
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if len(held) < _MOST_HELD:
                held.append(probe)
            else:
                probe.close()
        for probe in held:
            probe.detach()  # so nobody closes it
    return True


def _bind(host: str, port: int, key: str, probes: ExitStack, *, shares: bool) -> socket.socket | None:
    """Bind a socket, which `probes` close; None if the port is taken. Raises `ConfigError` for a host not ours."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        probe = probes.enter_context(socket.socket(family, kind))
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, shares)
        probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise ConfigError(f"{host!r} cannot be bound: {error.strerror}", key=key) from error
    return probe


def first_endpoints(broker: BrokerSection, run_dir: Path) -> Endpoints:
    """Return the endpoints of a broker that starts now. By TCP, it takes free ports for those that are 0.

    First come those of the run's earlier broker: peers elsewhere know them, and may know no other place to look. For
    Unix sockets, make their folder. Raises `RunDirError`, and `ConfigError` for a host that is not ours.
    """
    if not broker.host:
        folder = make_socket_folder(run_dir)
        return Endpoints(**{role: endpoint_of(folder, role) for role in broker.ports})
    known = read_broker_file(run_dir)
    before = {role: known.endpoints.port(role) for role, port in broker.ports.items() if known and not port}
    free = {role: port for role, port in before.items() if port and is_free(broker.host, port, "broker.host")}
    if taken := [port for role, port in before.items() if port and role not in free]:
        log.warning("the run's earlier ports %s are taken; start peers that name them again, with the new ones", taken)
    return Endpoints(**{role: f"tcp://{in_url(broker.host)}:{port}" for role, port in (broker.ports | free).items()})


def with_env_ports(config: FleetConfig) -> FleetConfig:
    """Return the configuration with a fixed port for each worker, which restarts do not change.

    Raises `ConfigError` for a host that cannot be bound, `PortInUseError` where no ports are free side by side.
    """
    sampling, host, workers = config.sampling, config.env_hosts_host, config.fleet.workers
    if sampling.env_placement != "remote" or sampling.env_hosts_port or not (host and workers):
        return config
    first = first_of_free(host, workers, "env hosts", "broker.host")
    return config.replaced({"sampling.env_hosts_port": first})


def env_endpoints(config: FleetConfig, run_dir: Path) -> dict[str, str]:
    """Return "envs-SLOT" -> the address of that worker for env hosts; none for envs that are not remote."""
    sampling, host = config.sampling, in_url(config.env_hosts_host)
    if sampling.env_placement != "remote":
        return {}
    if not host:
        return _sockets(config, run_dir, "envs")
    return {f"envs-{slot}": f"tcp://{host}:{sampling.env_hosts_port + slot}" for slot in range(config.fleet.workers)}


def _sockets(config: FleetConfig, run_dir: Path, kind: str) -> dict[str, str]:
    """Return "KIND-SLOT" -> the endpoint of that worker's Unix socket."""
    folder = make_socket_folder(run_dir)
    return {(name := f"{kind}-{slot}"): endpoint_of(folder, name) for slot in range(config.fleet.workers)}


def own_env_hosts(config: FleetConfig, run_dir: Path) -> Iterator[tuple[str, int]]:
    """Yield (address, number of envs) of each env host that the fleet starts.

    Workers get hosts in turn, and the hosts of one worker share its envs evenly.
    """
    hosts, workers = config.fleet.env_hosts, config.fleet.workers
    for number in range(hosts):
        slot = number % workers
        of_this_worker = len(range(slot, hosts, workers))
        bound = env_endpoints(config, run_dir)[f"envs-{slot}"]
        address = bound.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
        yield address, -(-config.sampling.num_envs // of_this_worker)


def with_client_ports(config: FleetConfig) -> FleetConfig:
    """Return the configuration with fixed TCP ports for each worker that serves clients, which restarts do not change.

    Raises `ConfigError` for a host that cannot be bound, `PortInUseError` where no ports are free side by side.
    """
    serving, workers = config.serving, config.fleet.workers
    if not serving.enabled or not workers:
        return config
    port, http_port = serving.port, serving.http_port
    if serving.host and not port:
        port = first_of_free(serving.host, workers, "clients", "serving.host", never=http_port or 0)
    if http_port == 0:
        http_port = first_of_free(serving.http_host, workers, "clients by HTTP", "serving.host", never=port)
    return config.replaced({"serving.port": port, "serving.http_port": http_port})


def client_endpoints(config: FleetConfig, run_dir: Path) -> dict[str, str]:
    """Return "clients-SLOT" and "http-SLOT" -> the address at which that worker serves clients."""
    serving = config.serving
    if not serving.enabled:
        return {}
    host = in_url(serving.http_host)
    ways = {"clients": ("tcp", serving.port), "http": ("http", serving.http_port)}
    by_port = {
        f"{name}-{slot}": f"{scheme}://{host}:{port + slot}"
        for slot in range(config.fleet.workers)
        for name, (scheme, port) in ways.items()
        if port
    }
    return by_port | (_sockets(config, run_dir, "clients") if not serving.host else {})
