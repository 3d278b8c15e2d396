"""Envs on other hosts as a vector that a sampler steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from headrace.schemas.errors import ConfigError
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.backend import EnvBackend
from headrace.workers.envs.process.elsewhere import ElsewhereVector
from headrace.workers.envs.process.ready import ReadyVector
from headrace.workers.envs.remote.pool import RemotePool
from headrace.workers.envs.remote.router_port import Door, DoorSettings, env_port_keys

_HIGHEST_PORT = 65_535


class RemoteVector(ElsewhereVector):
    """Lanes of a `RemotePool`. What has no host is waited for in the background, while the others go on.

    The worker in slot n listens on `env_hosts_port` + n; where that is 0, on one free port for as long as it lives.
    """

    def __init__(self, *args: Any, on_wait: Callable[[], None] | None = None) -> None:
        self._on_wait_for_first = on_wait
        self._port: int | None = None
        super().__init__(*args)

    def _open_pool(self, config: EnvRunnerConfig) -> EnvBackend:
        if self._port is None:
            self._port = config.env_hosts_port and config.env_hosts_port + self._worker_index
            if self._port > _HIGHEST_PORT:
                message = f"{config.env_hosts_port} plus slot {self._worker_index} is above {_HIGHEST_PORT}; lower it"
                raise ConfigError(message, key="env_hosts_port")
        keys = env_port_keys(config.env_hosts_keys)
        door = Door(DoorSettings(config.env_hosts_host, self._port, keys, config.env_hosts_allow_insecure))
        self._port = urlsplit(door.endpoint).port or 0
        return RemotePool(config, self._worker_index, self._seed_for, door, self._on_wait_for_first)


class ReadyRemoteVector(ReadyVector, RemoteVector):
    """Of which those lanes act whose hosts have answered: a slow host holds up nobody else's envs."""
