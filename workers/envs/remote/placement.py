"""Opens the backend of envs on other hosts."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import urlsplit

from headrace.schemas.basics.bounds import HIGHEST_PORT
from headrace.schemas.errors import ConfigError
from headrace.workers.envs.lane_table import LaneTable
from headrace.workers.envs.remote.pool import KindProblem, RemotePool
from headrace.workers.envs.remote.router_port import RouterPort, env_port_keys


class RemotePlacement:
    """Envs on the hosts that connect to the worker's port.

    The worker in slot n listens on `env_hosts_port` + n. If that setting is 0, it listens on one free port for its
    whole life. `kind_problem` says which envs are of the wrong kind. While the worker waits for its first host,
    `on_wait` is called from time to time with the address of the port.
    """

    def __init__(self, kind_problem: KindProblem, on_wait: Callable[[str], None] | None = None) -> None:
        self._kind_problem = kind_problem
        self._on_wait = on_wait
        self._port: int | None = None

    def open(self, table: LaneTable) -> RemotePool:
        """Listen, and wait for the first host. Raises `ConfigError` for a port that is too high."""
        config = table.config
        if self._port is None:
            self._port = config.env_hosts_port and config.env_hosts_port + table.worker_index
            if self._port > HIGHEST_PORT:
                message = f"{config.env_hosts_port} plus slot {table.worker_index} is above {HIGHEST_PORT}; lower it"
                raise ConfigError(message, key="env_hosts_port")
        keys = env_port_keys(config.env_hosts_keys, config.env_hosts_keys_group)
        router_port = RouterPort(
            config.env_hosts_host, self._port, keys, allow_insecure=config.env_hosts_allow_insecure
        )
        self._port = urlsplit(router_port.endpoint).port or 0
        on_wait, kind_problem = self._on_wait, self._kind_problem
        pool = RemotePool(config, table.worker_index, table.making_seed, router_port, kind_problem, on_wait)
        table.totals.calls.elsewhere = pool.longest_call
        return pool
