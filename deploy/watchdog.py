"""The watchdog over workers and env hosts that live but do nothing: stopped, hung or starved.

It reads workers' recorders and env hosts' liveness files.
"""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path

from headrace.deploy.event_loop import EventLoop
from headrace.deploy.liveness_file import seconds_silent
from headrace.deploy.recorders import recorder_path
from headrace.deploy.supervisor import Role, Service, ServiceState, Supervisor
from headrace.schemas.recorder import Reading, read_recorder

log = logging.getLogger("headrace.supervisor")

FIRST_SIGN_S = 60.0
"""Seconds that a new worker has before its recorder must exist: torch and the user's env take time to import."""


def why_silent(reading: Reading | None, lived_s: float, now_ns: int, lease_s: float, first_sign_s: float) -> str | None:
    """Return what to log about a silent worker; None when it is not silent."""
    if reading is None:
        return f"has given no sign of life in {lived_s:.0f} s" if lived_s > first_sign_s else None
    seconds_silent = (now_ns - reading.updated_ns) / 1e9
    if seconds_silent <= lease_s or now_ns <= reading.silent_until_ns:
        return None
    return f"has been silent for {seconds_silent:.1f} s"


class FleetWatchdog:
    """Replaces workers whose recorder has not been written for `lease_s`; looks four times a lease.

    It also replaces env hosts that have touched their liveness file once, and not again for `host_lease_s`.
    """

    def __init__(
        self,
        loop: EventLoop,
        supervisor: Supervisor,
        recorders: Path,
        lease_s: float,
        connect_timeout_s: float,
        host_lease_s: float = math.inf,
    ) -> None:
        self._loop = loop
        self._supervisor = supervisor
        self._recorders = recorders
        self._lease_s = lease_s
        self._host_lease_s = host_lease_s
        self._first_sign_s = max(FIRST_SIGN_S, connect_timeout_s + 10.0)
        self._interval_s = lease_s / 4
        self._last_look = time.monotonic()
        self._timer = loop.call_later(self._interval_s, self._look)

    def stop(self) -> None:
        """Stop watching."""
        self._timer.cancel()

    def _look(self) -> None:
        late_s = time.monotonic() - self._last_look - self._interval_s
        # otherwise this process was stopped itself, and perhaps the others too: look again later
        if late_s < self._lease_s / 2:
            for service in list(self._supervisor.services.values()):
                if service.state is ServiceState.RUNNING and (why := self._why_silent(service)) is not None:
                    self._supervisor.replace(service, why)
        self._last_look = time.monotonic()
        self._timer = self._loop.call_later(self._interval_s, self._look)

    def _why_silent(self, service: Service) -> str | None:
        child, slot = service.child, service.spec.slot
        if child is not None and service.spec.role is Role.WORKER and slot is not None:
            reading = read_recorder(recorder_path(self._recorders, slot, child.incarnation))
            lived_s = time.monotonic() - child.started
            return why_silent(reading, lived_s, time.monotonic_ns(), self._lease_s, self._first_sign_s)
        if child is not None and service.spec.role is Role.ENV_HOST:
            silent = seconds_silent(child.liveness_path)
            if silent is not None and silent > self._host_lease_s:
                return f"has been silent for {silent:.1f} s"
        return None
