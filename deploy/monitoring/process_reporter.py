"""The supervisor's report of its processes to Redis, in a thread of its own: it must not delay a restart."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from headrace.broker.redis.client import REDIS_FAILURES, connect
from headrace.broker.redis.parser import HashParser
from headrace.broker.redis.scripts import CLAIM
from headrace.schemas.accounts import redis_keys as keys
from headrace.schemas.accounts.figures import RESTARTS
from headrace.schemas.accounts.process_state import ProcessState
from headrace.schemas.accounts.redis_keys import unlabelled
from headrace.schemas.basics.printable import printable
from headrace.schemas.errors import ConfigError
from headrace.schemas.settings.redis_url import without_password

INTERVAL_S = 5.0
LIVE_S = 30
_LOOK_S = 1.0
"""Shortest pause between two reports. A stopped process should be told soon."""
_SHARE = 50
"""A pause is so many times as long as the look before it, within its bounds."""
_TIMEOUT_S = 2.0
_SETTLE_S = 0.2
"""Processes often start together: one report is enough for all."""

States = Mapping[str, ProcessState]


class FleetLease:
    """The lease of one run directory on a fleet's keys in Redis. An earlier supervisor of this directory is dead.

    `holder` names host and directory. The reporter renews the lease. Without Redis nobody can take it, and the fleet
    goes on.
    """

    def __init__(self, url: str, fleet_id: str, holder: str) -> None:
        self._url, self._fleet_id = without_password(url), fleet_id
        self._me = holder.encode(errors="replace")
        self._client = connect(url, _TIMEOUT_S)
        self._script = self._client.register_script(CLAIM)
        self._key = keys.key_name(fleet_id, keys.HOLDER)
        self.refusal: ConfigError | None = None
        """Set while another `headrace up` has the fleet."""

    def take(self) -> bool:
        """Take the lease. Return False while another one has it, which may be dead: then call again.

        Without Redis, the reporter takes the lease later.
        """
        try:
            if not self.renew():
                return False
        except REDIS_FAILURES:
            return self.refusal is None
        self.refusal = None
        return True

    def renew(self) -> bool:
        """Take the lease, or keep it for another 30 s. Return False if another one has it. Raises `REDIS_FAILURES`."""
        held: Any = self._script(keys=[self._key], args=[self._me, 1000 * LIVE_S])
        if held == self._me:
            return True
        told = printable(bytes(held).decode(errors="replace"))
        self.refusal = ConfigError(
            f"{self._fleet_id!r} is the fleet of another `headrace up` at Redis {self._url} (host and run directory: "
            f"{told}); its counters would be mixed with ours; end that one, or name another fleet_id",
            key="fleet.fleet_id",
        )
        return False

    def release(self) -> None:
        """Give the lease back, if it is ours."""
        with suppress(*REDIS_FAILURES):
            if self.refusal is None and self.renew():
                self._client.delete(self._key)
        self._client.close()


class ProcessReporter:
    """Writes what `states` returns to the hash `processes`: each second, and soon after a process changed.

    Where a look at the processes takes long, it reports less often, every 5 s at least.

    It adds up the restarts of processes, from those that Redis has of earlier supervisors. While Redis does not answer,
    the thread keeps trying.
    """

    def __init__(self, url: str, fleet_id: str, states: Callable[[], States], lease: FleetLease | None = None) -> None:
        self._lease = lease
        self._client = connect(url, _TIMEOUT_S)
        self._key = keys.key_name(fleet_id, keys.PROCESSES)
        self._totals_key = keys.key_name(fleet_id, keys.SUPERVISOR_TOTALS)
        self._states = states
        self._restarts_seen: dict[str, int] = {}
        """Restarts of each process, by name, that are in `_restarts`."""
        self._restarts: Counter[str] = Counter()
        """Restarts under this supervisor, by role."""
        self._restarts_before: dict[str, int] | None = None
        """Restarts under earlier supervisors, by role, as Redis had them. None until Redis has answered."""
        self._changed = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="process-report", daemon=True)
        self._thread.start()

    def changed(self) -> None:
        """Ask for a report soon. Any thread may call it."""
        self._changed.set()

    def close(self) -> None:
        """Report once more, and end the thread. Waits for Redis some seconds at most."""
        self._closing.set()
        self._changed.set()
        self._thread.join(3 * _TIMEOUT_S)
        self._client.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            began = time.monotonic()
            states = self._states()
            look_s = time.monotonic() - began
            self._report(states)
            self._changed.wait(max(_LOOK_S, min(INTERVAL_S, _SHARE * look_s)))
            self._closing.wait(_SETTLE_S)
            self._changed.clear()
        self._report(self._states())

    def _report(self, states: States) -> None:
        fields: dict[Any, Any] = {name: state.model_dump_json() for name, state in states.items()}
        self._count_restarts(states)
        try:
            if self._lease is not None and not self._lease.renew():
                return
            totals = self._restart_totals()
            with self._client.pipeline(transaction=True) as pipe:
                pipe.delete(self._key)
                pipe.hset(self._key, mapping=fields)
                pipe.expire(self._key, LIVE_S)
                if totals:
                    pipe.hset(self._totals_key, mapping=totals)
                pipe.execute()
        except REDIS_FAILURES:
            return  # the fleet's numbers say that Redis is away; the next report is due soon

    def _count_restarts(self, states: States) -> None:
        for name, state in states.items():
            more = state.restarts - self._restarts_seen.get(name, 0)
            self._restarts[state.role] += max(0, more)
            self._restarts_seen[name] = state.restarts

    def _restart_totals(self) -> dict[Any, Any]:
        """Return the fields of all lifetime counters. Reads those of before at the first call, so it may raise."""
        if self._restarts_before is None:
            stored: Any = self._client.hgetall(self._totals_key)
            fields = HashParser().totals(stored)
            self._restarts_before = {unlabelled(name)[2]: count for name, count in fields.items()}
        before = self._restarts_before
        return {
            keys.labelled(RESTARTS.name, RESTARTS.label, role): before.get(role, 0) + self._restarts[role]
            for role in sorted(before.keys() | self._restarts.keys())
        }
