"""What a worker needs of a policy server: `workers/serving/` has one, and the worker finds it by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pkgutil import resolve_name
from typing import Any, Protocol, cast

from headrace.schemas.accounts.ledger import Discard
from headrace.schemas.accounts.worker_figures import ServingFigures
from headrace.schemas.settings.config import FleetConfig
from headrace.workers.config import EnvRunnerConfig, runner_config


class ChunksOfClients(Protocol):
    """What clients that act by themselves have cut."""

    taken: Any
    """A `ClientChunks`."""

    def done(self) -> None:
        """Tell the client that its chunks are with the worker."""


class ClientsChannel(Protocol):
    """The channel to clients that act by themselves."""

    @property
    def has_waiting(self) -> bool:
        """Return whether a client waits for room."""

    def open(self, spaces: Any, num_envs: int, columns: Any) -> None:
        """Admit clients."""

    def take(self) -> ChunksOfClients | None:
        """Return the next chunks of a client."""

    def offer(self, version: Any, arrays: Any, digest: Any) -> None:
        """Give clients newer weights."""

    def end(self, reason: Discard) -> Iterable[ChunksOfClients]:
        """End all episodes, and return what is left of them."""


class ClientPort(Protocol):
    """The env of a worker that serves clients."""

    acting_channel: ClientsChannel | None
    waiting_for: str
    """The peer or event that the worker waits for while it takes no steps of clients. The worker sets it."""

    def ports(self) -> Mapping[str, str]:
        """Return the addresses for clients by their kind."""

    def figures(self) -> ServingFigures:
        """Return what has been served so far."""


def config_of_runner(config: FleetConfig) -> EnvRunnerConfig:
    """Return the runner's settings in a fleet's, with a policy server as its env where the fleet serves clients."""
    if not config.serving.enabled:
        return runner_config(config)
    return cast(EnvRunnerConfig, resolve_name("headrace.workers.serving.served_env:served_config")(config))


def client_port(config: FleetConfig, runner: EnvRunnerConfig) -> ClientPort | None:
    """Return the env of a worker that serves clients; None in a fleet that serves none."""
    return cast(ClientPort, runner.env) if config.serving.enabled else None
