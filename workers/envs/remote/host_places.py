"""The connected hosts, each lane's place on one of them, and the wait for a first one. Does no I/O."""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Set
from urllib.parse import urlsplit

from headrace.schemas.basics.printable import to_paste
from headrace.schemas.basics.process_usage import Usage
from headrace.schemas.errors import EnvHostLostError
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.failures import Failure
from headrace.workers.envs.process.control import Command
from headrace.workers.envs.process.lane_homes import SeedFor
from headrace.workers.envs.remote.peer import EnvHostPeer

log = logging.getLogger(__name__)


class HostPlaces:
    """`width` lanes, each with a place on a host, or waiting for one."""

    def __init__(self, width: int, seed_for: SeedFor) -> None:
        self.width = width
        self.hosts: dict[str, EnvHostPeer] = {}
        """Hosts by their life, in the order in which they came."""
        self._seed_for = seed_for
        self._rests = HostRests()
        self._cpu_s_before = 0.0
        """Processor time of the hosts that were parted from."""
        self._gone: list[tuple[EnvHostPeer, str]] = []
        """(host, reason) of each lost host that `bury` has not told of yet."""
        self._homes: list[tuple[EnvHostPeer, int] | None] = [None] * width
        self._wanting = dict.fromkeys(range(width), Command.BUILD)
        """Lanes that wait for a place, and their first command there."""

    def has_home(self, lane: int) -> bool:
        """Return whether the lane has a place."""
        return self._homes[lane] is not None

    @property
    def is_vacant(self) -> bool:
        """Return whether every lane waits for a place."""
        return len(self._wanting) == self.width

    @property
    def hosts_wanted(self) -> int:
        """Return how many hosts all lanes need: those connected, and more of their size for lanes without a place.

        Without a connected host it is one, because the size of the next host is not known.
        """
        sizes = [len(host.lanes) for host in self.hosts.values()]
        return len(sizes) - (-len(self._wanting) // max(sizes)) if sizes else 1

    @property
    def usage(self) -> Usage | None:
        """The use of all hosts together. The time includes hosts that have gone. None before a host has told it."""
        told = [host for host in self.hosts.values() if host.rss_bytes is not None]
        if not told:
            return None
        cpu_s = self._cpu_s_before + sum(host.cpu_s for host in told)
        return cpu_s, sum(host.rss_bytes or 0 for host in told)

    @property
    def has_losses(self) -> bool:
        """Return whether `bury` has failures to return."""
        return bool(self._gone)

    @property
    def is_busy(self) -> bool:
        """Return whether an answer is pending, a lane waits for a place, or `bury` has failures to return."""
        return bool(self._wanting or self._gone) or self.has_orders

    @property
    def has_orders(self) -> bool:
        """Return whether a host has an order without an answer."""
        return any(host.is_busy for host in self.hosts.values())

    @property
    def is_awaited(self) -> bool:
        """Return whether a host has a step or a reset without an answer."""
        return any(host.is_awaited for host in self.hosts.values())

    def ask(self, lane: int, command: Command, seed: int) -> None:
        """Queue `command` for the lane's place."""
        home = self._homes[lane]
        assert home is not None, "a lane that has failed is restarted before it is reset or stepped"
        home[0].ask(home[1], command, seed)

    def restart(self, lane: int) -> None:
        """Rebuild the lane's env in its place. Without a place, the lane waits for the next free one."""
        if self.has_home(lane):
            self.ask(lane, Command.REBUILD, self._seed_for(lane, True))
        else:
            self._wanting[lane] = Command.REBUILD

    def settle_in(self, now: float) -> None:
        """Give free places to lanes that wait for one. A host that rests gets none, unless all hosts rest."""
        if not self._wanting:
            return
        awake = [host for host in self.hosts.values() if not self._rests.is_resting(host.name, now)]
        hosts = awake or list(self.hosts.values())
        for lane in sorted(self._wanting) if hosts else ():
            home = next(((h, place) for h in hosts if (place := h.free_place()) is not None), None)
            if home is None:
                return
            host, place = self._homes[lane] = home
            host.lanes[place] = lane
            command = self._wanting.pop(lane)
            host.ask(place, command, self._seed_for(lane, command is Command.REBUILD))

    def part(self, host: EnvHostPeer, reason: str) -> None:
        """Forget the host. Its later messages belong to a life that is over."""
        held = host.taken()
        log.log(logging.WARNING if held else logging.DEBUG, "env host %s %s; it held envs %s", host.name, reason, held)
        del self.hosts[host.life]
        self._cpu_s_before += host.cpu_s
        self._gone.append((host, reason))

    def host_of(self, lane: int) -> EnvHostPeer | None:
        """Return the host on which the lane has a place, or None."""
        home = self._homes[lane]
        return home[0] if home is not None else None

    def refuse(self, lane: int, failing: Set[int], why: str, now: float) -> bool:
        """Part from the host of `lane`, which has failed too often, and have it rest. The lane has no place then.

        Return False, and do nothing, unless all lanes of the host are in `failing` while those of another host work: an
        env that fails on every host is not the fault of one.
        """
        home = self._homes[lane]
        if home is None:
            return True
        host, place = home
        if host.life in self.hosts:  # else it was parted from a moment ago, and `bury` has not told of its lanes
            if not self._fails_alone(host, failing):
                return False
            number, rest_s = self._rests.begin(host.name, now)
            self.part(host, f"gets no envs for {rest_s:g} s (rest {number} in a row), as its envs only fail: {why}")
        self._homes[lane] = host.lanes[place] = None  # `bury` must not tell of a lane that has failed already
        return True

    def _fails_alone(self, host: EnvHostPeer, failing: Set[int]) -> bool:
        others = [other for other in self.hosts.values() if other is not host and other.has_stepped]
        return failing >= set(host.taken()) and any(set(other.taken()) - failing for other in others)

    def bury(self) -> list[Failure]:
        """Return one failure for each lane that has lost its place since the last call."""
        failures = []
        for host, reason in self._gone:
            for place, lane in enumerate(host.lanes):
                if lane is not None:
                    order = host.under_way.get(place)
                    at = order.command.name.lower() if order is not None else "no call of its own"
                    self._homes[lane] = None
                    failures.append(Failure(lane, EnvHostLostError(host.name, reason), at=at))
        self._gone.clear()
        return failures


_FIRST_S, _LONGEST_S = 10.0, 600.0


class HostRests:
    """The rests of hosts, by name. The second rest of a host is twice as long, and so on.

    A host that was given envs for longer than the longest rest begins with a short one again.
    """

    def __init__(self) -> None:
        self._rests: dict[str, tuple[int, float]] = {}
        """Name -> (number of rests in a row, monotonic time in seconds at which the last one ends)."""

    def begin(self, name: str, now: float) -> tuple[int, float]:
        """Begin a rest of the host. Return its number in a row, and its length in seconds."""
        number, until = self._rests.pop(name, (0, now))
        number = 1 if now > until + _LONGEST_S else number + 1
        rest_s = min(_FIRST_S * 2.0 ** min(number - 1, 60), _LONGEST_S)
        self._rests[name] = number, now + rest_s
        return number, rest_s

    def is_resting(self, name: str, now: float) -> bool:
        """Return whether the host gets no envs now."""
        return now < self._rests.get(name, (0, now))[1]


_SAY_WAITING_S = 10.0
_PAUSE_S = 5.0
"""Seconds without a call of `look` after which the count starts again: no worker was waiting."""


class HostWait:
    """Measures how long a worker at `endpoint` has waited without any host."""

    def __init__(self, config: EnvRunnerConfig, endpoint: str) -> None:
        self._endpoint = endpoint
        self._remedy = f"headrace env-host --connect {to_paste(_address(endpoint))} --env {config.env or 'ENV'}"
        self._begin(time.monotonic())
        log.info("waiting for env hosts at %s: %s", endpoint, self._remedy)

    def _begin(self, now: float) -> None:
        self._since = self._looked_at = now
        self._say_at = now + _SAY_WAITING_S

    def look(self, is_one_here: bool, now: float) -> None:
        """Note that the worker waits `now`, in monotonic seconds. Warn from time to time."""
        if is_one_here or now - self._looked_at > _PAUSE_S:
            self._begin(now)
        self._looked_at = now
        if now >= self._say_at:
            self._say_at += _SAY_WAITING_S
            waited_s = now - self._since
            log.warning("no env host at %s for %.0f s; start one: %s", self._endpoint, waited_s, self._remedy)


def _address(endpoint: str) -> str:
    """Return the endpoint as other machines reach it: with this machine's name if it listens at all addresses."""
    url = urlsplit(endpoint)
    return f"tcp://{platform.node()}:{url.port}" if url.hostname in ("0.0.0.0", "::") else endpoint
