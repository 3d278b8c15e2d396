"""The supervisor keeps processes alive: start, watch by pidfd, restart with backoff, give up on a crash loop, stop.

    STARTING/RUNNING ── dies ──▶ RESTARTING ── pause ──▶ RUNNING
          │  │                        └── budget spent ──▶ FAILED (FleetError)
          │  └── error that a restart cannot cure, by its exit record ──▶ FAILED (FleetError)
          ├── fenced by a newer learner ──▶ FENCED ── that one has left ──▶ RUNNING
          ├── silent ──▶ replaced at once; the old process lives on as a zombie and is killed later
          └── stop() ──▶ STOPPING ── ends, or is killed after stop_timeout_s ──▶ STOPPED

Everything happens in the thread that turns the loop. It must be the main thread, since children die with the thread
that started them. `watchdog.py` notices processes that live and do nothing, and has them replaced here.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from headrace.deploy.process.child import Child, describe_end
from headrace.deploy.process.event_loop import EventLoop, Timer
from headrace.deploy.process.exit_record import ExitRecord
from headrace.deploy.process.fleet_errors import FleetError
from headrace.deploy.process.fork_server import ForkServer
from headrace.deploy.process.restarts import WINDOW_S, RestartPolicy
from headrace.deploy.terminal.logs import message_of
from headrace.schemas.basics.printable import without_episode
from headrace.schemas.basics.run_files import replace_private
from headrace.schemas.basics.stop_event import sigterm_blocked
from headrace.schemas.errors import ExitCode, HeadraceError, RunDirError, disk_full_error, removed_error, write_error
from headrace.schemas.settings.config import SupervisorSection

log = logging.getLogger("headrace.supervisor")

_LEAST_ROOM = 64 << 10
"""Bytes; a disk with less counts as full. Systems give the last bytes to some writers only."""

INCURABLE = frozenset(
    (
        ExitCode.USAGE,
        ExitCode.CONFIG,
        ExitCode.ENV,
        ExitCode.MODULE,
        ExitCode.RUN_DIR,
        ExitCode.WRONG_FLEET,
        ExitCode.VERSION_MISMATCH,
        ExitCode.ENV_RESTART_BUDGET,
        ExitCode.WINDOW_STALLED,
        ExitCode.KEYS,
    )
)
"""Exit codes of errors that a restart cannot cure."""
FINAL = INCURABLE | {ExitCode.CRASH_LOOP}
"""Exit codes after which a process is not started again. In a crash loop it has restarted its own often enough."""


class Role(StrEnum):
    """The role of a process in the fleet."""

    REDIS = "redis"
    BROKER = "broker"
    WORKER = "worker"
    LEARNER = "learner"
    ENV_HOST = "env-host"
    EVALUATOR = "evaluator"
    DASHBOARD = "dashboard"
    RECORDER = "recorder"
    RAY = "ray"
    """The process that keeps workers on a Ray cluster."""


class ServiceState(StrEnum):
    """The state of a service; see the drawing above."""

    RUNNING = "running"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FENCED = "fenced"
    FAILED = "failed"


OVER = (ServiceState.STOPPED, ServiceState.FENCED, ServiceState.FAILED)


@dataclass(frozen=True)
class ProcessSpec:
    """The way to start a process; `command` maps the incarnation to argv."""

    name: str
    role: Role
    command: Callable[[int], list[str]]
    slot: int | None = None
    env: Mapping[str, str] | None = None
    has_port: bool = False
    """True if the process serves a fixed port. Its next life needs the port, so a silent process is killed at once."""
    optional: bool = False
    """True if the fleet goes on without the process once it has failed for good."""


@dataclass
class Service:
    """A process that the supervisor keeps alive, over all its lives."""

    spec: ProcessSpec
    policy: RestartPolicy
    state: ServiceState = ServiceState.RESTARTING
    child: Child | None = None
    zombies: list[Child] = field(default_factory=list)
    restarts: int = 0
    has_delivered: bool = True
    """True if a step of its last life was committed, and for roles that take none."""
    last_words: str = ""
    """Text on how its last life ended, with the last line it logged."""
    timer: Timer | None = None
    """The pending restart, or the pending kill of a stopping child."""


class Observer(Protocol):
    """Gets the supervisor's news."""

    def next_incarnation(self, name: str) -> int:
        """Return a number higher than all earlier ones of `name`. Store it first, so that it survives this process."""

    def changed(self) -> None:
        """Note that some process started, ended or changed its state."""

    def has_delivered(self, service: Service, child: Child) -> bool:
        """Return whether a step of this life of a worker was committed. `service.child` is still that child."""

    def ended(self, service: Service, child: Child, returncode: int) -> None:
        """Note that a child of `service` has ended.

        `service.child` is still that child, unless it was a replaced one.
        """


class Supervisor:
    """Owns the child processes. `failure` is set once an error must end the fleet."""

    def __init__(
        self,
        loop: EventLoop,
        section: SupervisorSection,
        zombie_grace_s: float,
        logs: Path,
        observer: Observer,
        rng: random.Random | None = None,
        fork_server: ForkServer | None = None,
    ) -> None:
        self.services: dict[str, Service] = {}
        self.failure: HeadraceError | None = None
        self._loop = loop
        self._section = section
        self._zombie_grace_s = zombie_grace_s
        # Slurm's scancel sends SIGTERM to each process of a job. Then only the supervisor takes notice of it.
        self._stop_signal = signal.SIGINT if "SLURM_JOB_ID" in os.environ else signal.SIGTERM
        self._logs = logs
        self._observer = observer
        self._rng = rng or random.Random()
        self._fork_server = fork_server
        self._hurried: Role | None = None
        loop.on_error = self.fail

    def fail(self, error: OSError | HeadraceError) -> None:
        """Have the fleet end with an error, unless another one ends it already. Log each new one."""
        if isinstance(error, OSError):
            error = write_error(str(error.filename or self._logs.parent), error, "a file of the run")
        if self.failure is None or str(self.failure) != str(error):
            log.error("%s", error)
        self.failure = self.failure or error

    def trouble(self, what: str, seen: str) -> RunDirError | None:
        """Return why `what` cannot be written in the run directory; None if it can. `seen` made the caller ask."""
        what = f"{what} ({seen})"
        try:
            self._logs.stat()
            if shutil.disk_usage(self._logs).free < _LEAST_ROOM:
                return disk_full_error(str(self._logs), what)
            written = self._logs / ".written"
            replace_private(written, bytes(_LEAST_ROOM))  # a used-up quota leaves free room
            written.unlink()
        except FileNotFoundError:
            return removed_error(str(self._logs.parent), f" ({seen})")
        except OSError as error:
            return write_error(str(self._logs), error, what)
        return None

    def start(self, spec: ProcessSpec) -> Service:
        """Start a process and keep it alive from now on."""
        service = self.services[spec.name] = Service(spec, RestartPolicy(self._section.restart_attempts, self._rng))
        self._spawn(service)
        return service

    def replace(self, service: Service, why: str) -> None:
        """Replace a silent process by a new one.

        A silent worker is killed only after a grace, so that it may wake, find itself fenced and stop in
        order. It is killed immediately if the new worker needs its port.
        """
        zombie = service.child
        if zombie is None or service.state is not ServiceState.RUNNING:
            return
        log.warning("%s (pid %d) %s; a new one takes its place", service.spec.name, zombie.pid, why)
        service.last_words = f"silence ({why})"
        self._note_delivery(service, zombie)
        service.zombies.append(zombie)
        may_wake = service.spec.role is Role.WORKER and not service.spec.has_port
        grace_s = self._zombie_grace_s if may_wake else 0.0
        self._loop.call_later(grace_s, lambda: zombie.send(signal.SIGKILL))
        service.child = None
        self._restart(service, time.monotonic() - zombie.started, end=service.last_words)

    def bring_back(self, service: Service, why: str) -> None:
        """Restart a learner that a newer learner had fenced, once the newer one has left."""
        if service.state is ServiceState.FENCED:
            log.warning("%s starts again: %s", service.spec.name, why)
            service.restarts += 1
            self._spawn(service)

    def stop(self, *roles: Role) -> None:
        """Send the stop signal to every process of `roles`; kill those that still run after `stop_timeout_s`."""
        for service in self._of(roles):
            self.stop_one(service)
        self._observer.changed()

    def stop_one(self, service: Service) -> None:
        """Send the stop signal to one process, and kill it if it still runs after `stop_timeout_s`."""
        self._cancel(service)
        if service.child is not None:
            service.state = ServiceState.STOPPING
            service.child.send(self._stop_signal)
            service.timer = self._loop.call_later(self._section.stop_timeout_s, lambda: self._kill_late(service))
        elif service.state not in OVER:
            service.state = ServiceState.STOPPED
        for zombie in service.zombies:
            zombie.send(signal.SIGKILL)

    def hurry(self, role: Role) -> None:
        """Restart processes of this role without a pause from now on, those that wait now too."""
        self._hurried = role
        for service in self._of([role]):
            if service.state is ServiceState.RESTARTING:
                self._cancel(service)
                self._spawn(service)

    def start_again(self, service: Service) -> None:
        """Start a process that was stopped."""
        if service.state is ServiceState.STOPPED:
            self._spawn(service)

    def kill(self) -> None:
        """Kill every child at once and restart none."""
        for service in self.services.values():
            self._cancel(service)
            service.state = ServiceState.STOPPING if service.child else ServiceState.STOPPED
            for child in (service.child, *service.zombies):
                if child is not None:
                    child.send(signal.SIGKILL)

    def end_fork_server(self) -> None:
        """Stop the fork server. Processes that start later import torch themselves."""
        if self._fork_server is not None:
            self._fork_server.end()

    def gone(self, *roles: Role) -> bool:
        """Return whether no process of `roles` (none given: of any) lives or will start."""
        return all(one.child is None and not one.zombies and one.state in OVER for one in self._of(roles))

    def restarts(self) -> dict[str, int]:
        """Return restarts by role."""
        counts: dict[str, int] = {}
        for service in self.services.values():
            role = service.spec.role.value
            counts[role] = counts.get(role, 0) + service.restarts
        return counts

    def _of(self, roles: Iterable[Role]) -> list[Service]:
        wanted = tuple(roles) or tuple(Role)
        return [service for service in self.services.values() if service.spec.role in wanted]

    def _spawn(self, service: Service) -> None:
        spec = service.spec
        try:
            incarnation = self._observer.next_incarnation(spec.name)
            with sigterm_blocked(self._stop_signal is signal.SIGINT):
                child = Child(
                    spec.command(incarnation),
                    self._logs / f"{spec.name}.log",
                    incarnation=incarnation,
                    env=spec.env,
                    fork_server=self._fork_server,
                )
        except (OSError, RunDirError) as error:
            what = f"what {spec.name} needs to start"
            cause = error if isinstance(error, RunDirError) else write_error(str(self._logs.parent), error, what)
            service.timer = None
            self._fail(service, cause)
            self._observer.changed()
            return
        service.child, service.state, service.timer = child, ServiceState.RUNNING, None
        self._loop.watch(child.pidfd, lambda: self._on_end(service, child))
        log.info("%s started: pid %d, incarnation %d", spec.name, child.pid, incarnation)
        self._observer.changed()

    def _on_end(self, service: Service, child: Child) -> None:
        self._loop.forget(child.pidfd)
        returncode = child.reap()
        if child is service.child:
            self._note_delivery(service, child)
        self._observer.ended(service, child, returncode)
        if child is service.child:
            service.child = None
            self._after_end(service, child, returncode)
        else:
            service.zombies.remove(child)
            log.info("%s: replaced pid %d ended with %s", service.spec.name, child.pid, describe_end(returncode))
        self._observer.changed()

    def _note_delivery(self, service: Service, child: Child) -> None:
        if service.spec.role is Role.WORKER:
            service.has_delivered = self._observer.has_delivered(service, child)

    def _after_end(self, service: Service, child: Child, returncode: int) -> None:
        name, end, record = service.spec.name, describe_end(returncode), child.exit_record
        may_be_user_code = returncode in INCURABLE or (returncode == ExitCode.OK and service.spec.role is Role.WORKER)
        unannounced = record is None and (returncode != ExitCode.OK or may_be_user_code)
        trouble = self.trouble(f"what {name} keeps", f"{name} ended with {end}") if unannounced else None
        if unannounced and may_be_user_code and trouble is None:
            end += ", which it did not announce: an env or module of yours ended it"
        service.last_words = end + _because(child)
        if service.state is ServiceState.STOPPING:
            self._cancel(service)
            service.state = ServiceState.STOPPED
            log.info("%s stopped with %s", name, end)
        elif record is not None and returncode == ExitCode.FENCED and service.spec.role is Role.LEARNER:
            service.state = ServiceState.FENCED
            log.warning("%s: %s; the newer learner has the fleet now", name, record.sentence or "fenced")
        elif record is not None and _is_final(record, service):
            sentence = record.sentence or f"ended with {end}"
            if not record.sentence or returncode == ExitCode.ENV_RESTART_BUDGET:
                sentence += f"; its log is {child.log_path}"
            self._fail(service, FleetError(f"{name}: {sentence}", ExitCode(returncode)))
        elif trouble is not None:
            self._fail(service, trouble)
        else:
            log.warning("%s (pid %d) ended with %s%s", name, child.pid, end, _because(child) if returncode >= 0 else "")
            self._restart(service, time.monotonic() - child.started, child, end=end)

    def _restart(self, service: Service, lived_s: float, child: Child | None = None, *, end: str) -> None:
        delay_s = service.policy.after_death(lived_s, has_delivered=service.has_delivered)
        if delay_s is None:
            self._fail(service, self._crash_loop(service, child, end))
            return
        delay_s = 0.0 if service.spec.role is self._hurried else delay_s
        service.state = ServiceState.RESTARTING
        service.restarts += 1
        log.info("%s starts again in %.2f s (restart %d)", service.spec.name, delay_s, service.restarts)
        service.timer = self._loop.call_later(delay_s, lambda: self._spawn(service))
        self._observer.changed()

    def _crash_loop(self, service: Service, child: Child | None, end: str) -> FleetError:
        lines = child.log_lines(10) if child else []
        tail = "\n  ".join(["; its last log lines:", *lines]) if lines else "; it wrote no log"
        deaths, window_s = service.policy.deaths_in_window, WINDOW_S
        often = f"died {deaths} times within {window_s:g} s of running"
        if service.policy.fruitless > self._section.restart_attempts:
            often = f"died {service.policy.fruitless} times in a row before any step of it was committed"
        memory = ", or lower sampling.num_envs where memory is short" if "SIGKILL" in end else ""
        return FleetError(
            f"{service.spec.name} {often} (last: {end}) and is given up; "
            f"repair it, or raise supervisor.restart_attempts{memory}{tail}",
            ExitCode.CRASH_LOOP,
        )

    def _fail(self, service: Service, error: HeadraceError) -> None:
        service.state = ServiceState.FAILED
        if not service.spec.optional:
            self.failure = self.failure or error
        log.error("%s%s", error, "; the fleet goes on without it" if service.spec.optional else "")

    def _kill_late(self, service: Service) -> None:
        if service.child is not None:
            ignored = "%s ignored %s for %g s and is killed"
            log.warning(ignored, service.spec.name, self._stop_signal.name, self._section.stop_timeout_s)
            service.child.send(signal.SIGKILL)

    def _cancel(self, service: Service) -> None:
        if service.timer is not None:
            service.timer.cancel()
            service.timer = None


def _is_final(record: ExitRecord, service: Service) -> bool:
    """Return whether a restart would fail in the same way. A port that was free once will be free again."""
    return record.exit_code in FINAL or (record.exit_code == ExitCode.PORT_IN_USE and service.restarts == 0)


def _because(child: Child) -> str:
    """Return the reason a process gave: its error, else the last line it wrote (of a traceback, most likely)."""
    said = child.last_error() or "".join(map(message_of, child.log_lines(1)))
    return f": {without_episode(said)}" if said else ""
