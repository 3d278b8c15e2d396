"""The connection of this process to a Ray cluster."""

from __future__ import annotations

import logging
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from urllib.parse import urlsplit

from headrace.deploy.process.fleet_errors import FleetError
from headrace.schemas.errors import ConfigError, ExitCode
from headrace.schemas.settings.config import is_loopback
from headrace.schemas.settings.plugins import check_package

CONNECT_S = 10.0
_START = "start one with `ray start --head`, or name the address of its head in ray.address"
NAMESPACE = "headrace"
_WILDCARDS = ("0.0.0.0", "::", "*")


def check_cluster(address: str) -> None:
    """Check that Ray is installed, and that something listens where the cluster's head should.

    `ray.init` would try for minutes, deaf to signals. Raises `ConfigError` and `FleetError`.
    """
    if find_spec("ray") is None:
        raise ConfigError("workers on Ray need the extra ray: pip install 'headrace[ray]'", key="ray.workers")
    host, colon, port = (_noted_address() if address == "auto" else address).rpartition(":")
    try:
        if colon and port.isdecimal():
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise _no_cluster(address, str(error)) from error


@contextmanager
def joined(address: str) -> Iterator[ModuleType]:
    """Connect this process to the cluster at `address`, and yield the module `ray`.

    The actors that this process starts end with the connection. Raises what `check_cluster` raises.
    """
    check_cluster(address)
    check_package("a fleet on Ray", "ray", "ray", key="ray.workers")
    import ray

    logging.setLogRecordFactory(logging.LogRecord)  # Ray's own adds a field to each line of our logs
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise _no_cluster(address, str(error).partition("\n")[0]) from error
    except SystemExit:  # Ray raises this on SIGTERM
        raise SystemExit(ExitCode.OK) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _noted_address() -> str:
    """Return what Ray takes for "auto": RAY_ADDRESS, else the address of this machine's last cluster, else ""."""
    with suppress(OSError):
        noted = (Path(tempfile.gettempdir()) / "ray" / "ray_current_cluster").read_text()
        return os.environ.get("RAY_ADDRESS", noted).strip()
    return os.environ.get("RAY_ADDRESS", "")


def reachable(endpoint: str, own: str, nodes: set[str]) -> str:
    """Return the broker's endpoint as the cluster's nodes reach it.

    `own` is Ray's address of this machine, and replaces a wildcard; `nodes` has the addresses of all nodes. Raises
    `ConfigError` if the broker serves only this machine and the cluster has other nodes.
    """
    host = urlsplit(endpoint).hostname or ""
    if host in _WILDCARDS:
        return f"tcp://{f'[{own}]' if ':' in own else own}:{urlsplit(endpoint).port}"
    elsewhere = sorted(nodes - {own})
    if elsewhere and (not endpoint.startswith("tcp:") or is_loopback(host)):
        raise ConfigError(
            f"the broker at {endpoint} serves this machine only, and the Ray cluster has nodes elsewhere "
            f'({", ".join(elsewhere[:3])}); set broker.host = "0.0.0.0" and keys.dir',
            key="broker.host",
        )
    return endpoint


def addresses(ray: ModuleType) -> tuple[str, set[str]]:
    """Return Ray's address of this machine, and those of all living nodes."""
    nodes = {str(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]}
    return str(ray.util.get_node_ip_address()), nodes


def _no_cluster(address: str, reason: str) -> FleetError:
    problem = f"no Ray cluster can be joined at {address!r}: {reason}; {_START}"
    return FleetError(problem, ExitCode.UNREACHABLE)
