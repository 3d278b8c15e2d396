"""The watchdog over processes that live but do nothing: stopped, hung or starved.

It reads the recorders of workers, the liveness files of processes that have one, and the state of each process.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from headrace.deploy.process.child import Child
from headrace.deploy.process.event_loop import EventLoop
from headrace.deploy.process.liveness_file import FIRST_SIGN_S, seconds_silent
from headrace.deploy.process.proc_stat import is_stopped
from headrace.deploy.process.supervisor import Role, Service, ServiceState, Supervisor
from headrace.schemas.accounts.recorder import Reading, read_recorder
from headrace.schemas.accounts.recorder_file import seconds_of_silence
from headrace.schemas.settings.config import FleetConfig
from headrace.schemas.settings.sampling_settings import ENV_CLOSE_TIMEOUT_S

log = logging.getLogger("headrace.supervisor")


def why_silent(reading: Reading | None, lived_s: float, now_ns: int, lease_s: float, first_sign_s: float) -> str | None:
    """Return what to log about a silent worker; None when it is not silent."""
    if reading is None:
        return why_without_sign(lived_s, first_sign_s)
    silent_s, allowed_s = seconds_of_silence(reading.updated_ns, reading.silent_until_ns, reading.watched, now_ns)
    if silent_s - allowed_s <= lease_s:
        return None
    in_call = reading.watched.in_words(now_ns, reading.updated_ns)
    return f"has been silent for {silent_s:.1f} s" + (in_call and f": {in_call}")


def why_without_sign(lived_s: float, first_sign_s: float) -> str | None:
    """Return what to log about a process that has given no sign of life yet; None while it has time to start."""
    return f"has given no sign of life in {lived_s:.0f} s" if lived_s > first_sign_s else None


class FleetWatchdog:
    """Replaces workers whose recorder has not been written for `lease_s`; looks four times a lease.

    In a call of the user's code a worker has the call's own limit before.

    `recorder_of` returns the recorder of a worker's present life; None while it has none.

    It also replaces a process of another role whose liveness file has not been touched for the role's `limits_s`. It
    replaces any process that gave no sign of life within the role's `first_sign_s`, and any that has been stopped
    (SIGSTOP) for `lease_s`. If another learner has fenced the fleet's own, and `learner_left` for `lease_s`, it
    restarts the fleet's own learner.
    """

    def __init__(
        self,
        loop: EventLoop,
        supervisor: Supervisor,
        recorder_of: Callable[[Service], Path | None],
        lease_s: float,
        first_sign_s: Mapping[str, float],
        limits_s: Mapping[str, float] | None = None,
        learner_left: Callable[[], bool] = lambda: False,
    ) -> None:
        self._loop = loop
        self._supervisor = supervisor
        self._recorder_of = recorder_of
        self._lease_s = lease_s
        self._limits_s = dict(limits_s or {})
        self._learner_left = learner_left
        self._left_since = math.inf
        """Time of the first look that found no learner."""
        self._stopped_since: dict[int, float] = {}
        """Pid -> time of the first look that found the process stopped."""
        self._first_sign_s = dict(first_sign_s)
        self._interval_s = lease_s / 4
        self._last_look = time.monotonic()
        self._timer = loop.call_later(self._interval_s, self._look)

    def stop(self) -> None:
        """Stop watching."""
        self._timer.cancel()

    def _look(self) -> None:
        self._timer = self._loop.call_later(self._interval_s, self._look)
        late_s = time.monotonic() - self._last_look - self._interval_s
        self._last_look = time.monotonic()
        # If this look is late, this process was stopped itself, and perhaps the others too: look again later.
        if late_s < self._lease_s / 2:
            self._note_stopped()
            self._bring_back_learner()
            for service in list(self._supervisor.services.values()):
                if service.state is not ServiceState.RUNNING or (why := self._why_silent(service)) is None:
                    continue
                trouble = self._supervisor.trouble("a sign of life", f"{service.spec.name} {why}")
                if trouble is None:
                    self._supervisor.replace(service, why)
                else:  # its signs of life are files, and so are those of the process that would replace it
                    self._supervisor.fail(trouble)
                    break

    def _why_silent(self, service: Service) -> str | None:
        child = service.child
        if child is None:
            return None
        lived_s = time.monotonic() - child.started
        first_sign_s = self._first_sign_s.get(service.spec.role, math.inf)
        if service.spec.role is Role.WORKER:
            recorder = self._recorder_of(service)
            reading = read_recorder(recorder) if recorder is not None else None
            why = why_silent(reading, lived_s, time.monotonic_ns(), self._lease_s, first_sign_s)
            return why or (None if reading is None else self._why_stopped(child))
        silent = seconds_silent(child.liveness_path)
        if silent is None and (why := why_without_sign(lived_s, first_sign_s)) is not None:
            return why
        if silent is not None and silent > self._limits_s.get(service.spec.role, math.inf):
            return f"has been silent for {silent:.1f} s"
        return self._why_stopped(child)

    def _why_stopped(self, child: Child) -> str | None:
        stopped = time.monotonic() - self._stopped_since.get(child.pid, math.inf)
        return f"has been stopped for {stopped:.1f} s" if stopped > self._lease_s else None

    def _bring_back_learner(self) -> None:
        fenced = [service for service in self._supervisor.services.values() if service.state is ServiceState.FENCED]
        now = time.monotonic()
        self._left_since = min(self._left_since, now) if fenced and self._learner_left() else math.inf
        if now - self._left_since > self._lease_s:
            for service in fenced:
                self._supervisor.bring_back(service, f"no learner was connected for {now - self._left_since:.1f} s")

    def _note_stopped(self) -> None:
        children = (service.child for service in self._supervisor.services.values())
        stopped = {child.pid for child in children if child is not None and is_stopped(child.pid)}
        now = time.monotonic()
        self._stopped_since = {pid: self._stopped_since.get(pid, now) for pid in stopped}


def silence_limits(config: FleetConfig) -> dict[str, float]:
    """Return the seconds between two signs of life that a role may take, by the role's name."""
    return {
        "worker": config.broker.lease_s,
        "broker": config.broker.lease_s,
        "learner": config.supervisor.hung_after_s,
        # A host is silent while it closes its envs. Its worker may already count it as lost by then.
        "env-host": config.broker.lease_s + ENV_CLOSE_TIMEOUT_S,
    }


def first_sign_limits(config: FleetConfig) -> dict[str, float]:
    """Return the seconds that a new process may take until its first sign of life, by the role's name.

    An env host is not listed: until its first sign it builds an env, which has a deadline of its own.
    """
    return {
        "worker": max(FIRST_SIGN_S, config.worker.connect_timeout_s + 10.0),
        "broker": FIRST_SIGN_S,
        "learner": max(FIRST_SIGN_S, config.supervisor.hung_after_s),
    }
