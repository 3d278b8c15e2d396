"""The choice of one worker among those that a rendezvous publishes, by an env host or a client that names no slot."""

from __future__ import annotations

import random
import threading

from headrace.schemas.accounts.worker_figures import PortKind, fits_kind
from headrace.schemas.errors import HeadraceError
from headrace.schemas.peers.rendezvous import Port, Rendezvous, is_elsewhere


class WorkerPortChoice:
    """An `AddressSource` of the ports of `kind`. It keeps to the slot that it chose, as long as that is published.

    - slot: the slot to which it always keeps; None lets it choose. It chooses at random, among workers that wait for
      env hosts before others.
    - key: the fingerprint of the worker's key that the peer expects; workers with other keys do not count.

    Any thread may ask.
    """

    def __init__(self, rendezvous: Rendezvous, kind: PortKind, slot: int | None = None, key: str = "") -> None:
        self._rendezvous = rendezvous
        self._kind = kind
        self._key = key
        self._fixed = f"{kind}-{slot}" if slot is not None else ""
        self._chosen = self._fixed
        self._lock = threading.Lock()
        self._random = random.Random()
        self._problem = ""

    @property
    def problem(self) -> str:
        """Return a text on why there is no such worker."""
        return self._problem or self._rendezvous.problem

    def find(self, role: str = "") -> str:
        """Return the address of the chosen worker now; "" while there is none. `role` does not count."""
        with self._lock:
            ports = self.ports()
            if self._chosen not in ports and not self._fixed:
                self._chosen = self._choose(ports)
            return self._address(ports)

    def elsewhere(self) -> str:
        """Choose another worker, that waits for env hosts, and return its address; "" if there is none."""
        with self._lock:
            ports = self.ports()
            waiting = [name for name, port in ports.items() if port.lacks_hosts and name != self._chosen]
            if self._fixed or not waiting or self._chosen not in ports or ports[self._chosen].lacks_hosts:
                return ""
            self._chosen = self._random.choice(waiting)
            return self._address(ports)

    def stopped(self) -> HeadraceError | None:
        """Return an error that says so, if the fleet has stopped."""
        return self._rendezvous.stopped()

    @property
    def at_goal(self) -> bool:
        """Return whether the fleet has reached its goal."""
        return self._rendezvous.at_goal

    def ports(self) -> dict[str, Port]:
        """Return the ports that this peer can use: of its kind, reachable from here, with the key that it expects."""
        found = self._rendezvous.look()
        if found is None or found.state == "stopped":
            return {}
        return {
            name: port
            for name, port in found.ports.items()
            if name.rpartition("-")[0] == self._kind
            and fits_kind(self._kind, port.address)
            and not is_elsewhere(port.address, port.host)
            and (not self._key or port.key in ("", self._key))
        }

    def _address(self, ports: dict[str, Port]) -> str:
        port = ports.get(self._chosen)
        self._problem = "" if port is not None or self._rendezvous.problem else self._none()
        return port.address if port is not None else ""

    def _choose(self, ports: dict[str, Port]) -> str:
        waiting = [name for name, port in ports.items() if port.lacks_hosts]
        return self._random.choice(waiting or list(ports)) if ports else ""

    def _none(self) -> str:
        which = f"worker of slot {self._fixed.rpartition('-')[2]}" if self._fixed else "worker"
        whom = "env hosts" if self._kind == "envs" else "clients"
        return f"{self._rendezvous.where} names no {which} that serves {whom} of this machine with these keys"
