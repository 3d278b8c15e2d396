"""Endpoints at which the broker will serve, known before it starts."""

from __future__ import annotations

from pathlib import Path

from headrace.broker.state_file import Endpoints
from headrace.deploy.run.free_ports import first_of_free
from headrace.schemas.peers.socket_folder import endpoint_of, make_socket_folder
from headrace.schemas.settings.config import BrokerSection, is_loopback

_ROLES = ("worker", "learner", "weights")


def first_endpoints(broker: BrokerSection, run_dir: Path) -> Endpoints:
    """Return the endpoints of a broker that starts now: configured ports, and free ones in place of 0.

    Off loopback a port that is not configured stays 0, and the broker takes a free one. Unix sockets are in a folder
    that this makes; it raises `SocketFolderError`.
    """
    if broker.transport == "ipc":
        folder = make_socket_folder(run_dir)
        return Endpoints(**{role: endpoint_of(folder, role) for role in _ROLES})
    host = f"[{broker.host}]" if ":" in broker.host and not broker.host.startswith("[") else broker.host
    ports = {role: getattr(broker, f"{role}_port") for role in _ROLES}
    configured = {port for port in ports.values() if port}
    while is_loopback(broker.host) and not all(ports.values()):
        first = first_of_free(broker.host, len(_ROLES), "the broker", "broker.host")
        if configured.isdisjoint(range(first, first + len(_ROLES))):
            ports = {role: port or first + place for place, (role, port) in enumerate(ports.items())}
    return Endpoints(**{role: f"tcp://{host}:{port}" for role, port in ports.items()})
