"""Ports at which clients connect to each worker of the fleet, if it serves any."""

from __future__ import annotations

from headrace.deploy.run.free_ports import first_of_free
from headrace.schemas.settings.config import FleetConfig


def with_client_ports(config: FleetConfig) -> FleetConfig:
    """Return the configuration with fixed ports for each worker that serves clients, which restarts do not change.

    Raises `ConfigError` for a host that cannot be bound, `PortInUseError` where no ports are free side by side.
    """
    serving, workers = config.serving, config.fleet.workers
    if not serving.enabled or not workers:
        return config
    port, http_port = serving.port, serving.http_port
    if not port:
        port = first_of_free(serving.host, workers, "clients", "serving.host", never=http_port or 0)
    if http_port == 0:
        http_port = first_of_free(serving.host, workers, "clients by HTTP", "serving.host", never=port)
    found = serving.model_copy(update={"port": port, "http_port": http_port})
    return config.model_copy(update={"serving": found})


def client_endpoints(config: FleetConfig) -> dict[str, str]:
    """Return "clients-SLOT" and "http-SLOT" -> the address at which that worker serves clients."""
    serving = config.serving
    if not serving.enabled:
        return {}
    host = f"[{serving.host}]" if ":" in serving.host else serving.host
    ways = {"clients": ("tcp", serving.port), "http": ("http", serving.http_port)}
    return {
        f"{name}-{slot}": f"{scheme}://{host}:{port + slot}"
        for slot in range(config.fleet.workers)
        for name, (scheme, port) in ways.items()
        if port
    }
