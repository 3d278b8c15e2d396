"""Where clients come to each worker of the fleet, if it serves any."""

from __future__ import annotations

from headrace.schemas.config import FleetConfig


def client_endpoints(config: FleetConfig) -> dict[str, str]:
    """ "clients-SLOT" and "http-SLOT" -> where that worker serves clients; none for a port that it takes by itself."""
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
