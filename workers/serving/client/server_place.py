"""The address of a client's policy server, which changes when a worker of the fleet starts again elsewhere."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from headrace.schemas.credentials.keys import ClientKeys, expected_key
from headrace.schemas.errors import ConfigError, no_fleet_error
from headrace.schemas.peers.fleet_address import AddressSource, await_address
from headrace.schemas.peers.fleet_place import FleetPlace
from headrace.schemas.peers.rendezvous import RENDEZVOUS_VARIABLE, Rendezvous
from headrace.schemas.peers.worker_port_choice import WorkerPortChoice

SERVER = "policy server"


class ServerPlace:
    """The address of one policy server, for all connections of a client. Without a `source` it stays.

    Any thread may call.
    """

    def __init__(self, endpoint: str, source: AddressSource | None = None) -> None:
        self.may_move = source is not None
        self._place = FleetPlace(endpoint, "clients", source, server=SERVER)
        self._lock = threading.Lock()

    def follow(self, *, is_connected: bool) -> str:
        """Return the address now. A caller without a connection makes it look for a new one."""
        if self.may_move:
            with self._lock:
                self._place.observe(is_connected, time.monotonic())
        return self._place.endpoint


def find_server(
    where: str | Path | None, keys: ClientKeys | None, slot: int | None = None, connect_timeout_s: float = 60.0
) -> ServerPlace:
    """Return the place of a worker that serves clients, once one is at the rendezvous `where`.

    `where` is a file or a URL; None: the one in HEADRACE_FLEET__RENDEZVOUS. `slot` None: any worker. Logs every ten
    seconds what it waits for. Raises `UnreachableError` when there is none within `connect_timeout_s`, and
    `ConfigError` for no such rendezvous.
    """
    where = str(where or os.environ.get(RENDEZVOUS_VARIABLE, ""))
    if not where or where.startswith("dns://"):
        raise ConfigError(f"give a file or URL, or set {RENDEZVOUS_VARIABLE}; got {where!r:.80}", key="rendezvous")
    source = WorkerPortChoice(Rendezvous(where), "clients", slot, expected_key(keys))
    endpoint = await_address(source, "clients", connect_timeout_s)
    if not endpoint:
        raise no_fleet_error(where, source.problem)
    return ServerPlace(endpoint, source)
