"""Finds the ports of live workers for env hosts and clients, for the rendezvous to publish."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from headrace.broker.batches.broker_observer import BrokerObserver
from headrace.broker.batches.source import Source
from headrace.broker.files.rendezvous_file import RendezvousFile
from headrace.broker.sessions.core import BrokerCore
from headrace.schemas.accounts.ledger import Discard
from headrace.schemas.accounts.worker_figures import Ports
from headrace.schemas.credentials.known_keys import KnownKeys
from headrace.schemas.peers.rendezvous import MOST_PORTS, Port

log = logging.getLogger(__name__)

_LOOK_S = 0.5


class WorkerPorts(BrokerObserver):
    """The ports that workers tell in heartbeats, by "KIND-SLOT".

    A port is published until the worker leaves, or the lease of the life that told it ends. So peers wait for a worker
    that is restarted.
    """

    def __init__(self, core: BrokerCore, file: RendezvousFile, keys: KnownKeys | None) -> None:
        self._core = core
        self._file = file
        self._keys = keys
        self._ports: dict[str, tuple[Port, Source]] = {}
        self._look_at = 0.0
        self._left_out = False

    def tick(self, now: float) -> None:
        """Publish what has changed, at most twice a second."""
        if now < self._look_at:
            return
        self._look_at = now + _LOOK_S
        live = [source for source in self._core.live() if source.figures.beat.ports]
        if not live and not self._ports:
            return
        self._ports = {name: told for name, told in self._ports.items() if _may_return(told[1], now)}
        keys = self._fingerprints() if self._keys is not None else {}
        for source in live:
            for name, port in _ports_of(source, keys.get(source.key_group, "")):
                if name in self._ports or len(self._ports) < MOST_PORTS:
                    self._ports[name] = port, source
                elif not self._left_out:
                    self._left_out = True
                    log.warning("%s and others are not published: a rendezvous has at most %d ports", name, MOST_PORTS)
        self._file.publish({name: port for name, (port, _) in self._ports.items()})

    def _fingerprints(self) -> dict[str, str]:
        """Return the fingerprint of the workers' key of each group."""
        assert self._keys is not None
        found = [key for public in self._keys.roles if (key := self._keys.find(public)) is not None]
        return {key.group: key.fingerprint for key in found if key.role == "worker"}


def _may_return(source: Source, now: float) -> bool:
    """Return whether the life goes on, or the next of its slot may follow soon."""
    return now < source.silent_until and source.end_reason != Discard.SHUTDOWN


def _ports_of(source: Source, key: str) -> Iterator[tuple[str, Port]]:
    connected, wanted = source.figures.beat.env_hosts or (0, 0)
    for kind, address in (source.figures.beat.ports or Ports()).by_kind().items():
        lacks_hosts = kind == "envs" and connected < wanted
        yield f"{kind}-{source.slot}", Port(address=address, host=source.host, key=key, lacks_hosts=lacks_hosts)
