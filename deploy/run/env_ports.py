"""Ports at which env hosts connect to each worker of the fleet, and the env hosts that the fleet starts itself."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.deploy.run.free_ports import first_of_free
from headrace.schemas.settings.config import FleetConfig


def with_env_ports(config: FleetConfig) -> FleetConfig:
    """Return the configuration with a fixed port for each worker, which restarts do not change.

    Raises `ConfigError` for a host that cannot be bound, `PortInUseError` where no ports are free side by side.
    """
    sampling = config.sampling
    if sampling.env_placement != "remote" or sampling.env_hosts_port or not config.fleet.workers:
        return config
    host, workers = sampling.env_hosts_host, config.fleet.workers
    first = first_of_free(host, workers, "env hosts", "sampling.env_hosts_host")
    return config.model_copy(update={"sampling": sampling.model_copy(update={"env_hosts_port": first})})


def env_endpoints(config: FleetConfig) -> dict[str, str]:
    """Return "envs-SLOT" -> the address of that worker for env hosts; none for envs that are not remote."""
    sampling = config.sampling
    if sampling.env_placement != "remote":
        return {}
    host = f"[{sampling.env_hosts_host}]" if ":" in sampling.env_hosts_host else sampling.env_hosts_host
    return {f"envs-{slot}": f"tcp://{host}:{sampling.env_hosts_port + slot}" for slot in range(config.fleet.workers)}


def own_env_hosts(config: FleetConfig) -> Iterator[tuple[str, int]]:
    """Yield (address, number of envs) of each env host that the fleet starts.

    Workers get hosts in turn, and the hosts of one worker share its envs evenly.
    """
    hosts, workers = config.fleet.env_hosts, config.fleet.workers
    for number in range(hosts):
        slot = number % workers
        of_this_worker = len(range(slot, hosts, workers))
        yield _near(env_endpoints(config)[f"envs-{slot}"]), -(-config.sampling.num_envs // of_this_worker)


def _near(endpoint: str) -> str:
    """Return the endpoint's address on this machine, where a worker may listen at all addresses."""
    return endpoint.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
