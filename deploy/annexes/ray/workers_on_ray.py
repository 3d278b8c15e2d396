"""Keeps a number of workers on a Ray cluster, each in an actor of its own.

Ray places the actors and starts them again after the death of a process or a node (`max_restarts=-1`): it then calls
`run` again. This module restarts actors that were killed for good, and workers that ended by themselves.
"""

from __future__ import annotations

import logging
import random
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from headrace.deploy.annexes.ray.worker_actor import WorkerActor, WorkerEnd, WorkerStart
from headrace.deploy.process.child import describe_end
from headrace.deploy.process.fleet_errors import FleetError
from headrace.deploy.process.restarts import WINDOW_S, RestartPolicy
from headrace.deploy.process.supervisor import FINAL
from headrace.schemas.errors import ExitCode
from headrace.schemas.settings.config import FleetConfig

log = logging.getLogger("headrace.ray")

_SAY_WAITING_S = 10.0
_CPUS = 1
"""CPUs that Ray sets aside for a worker."""
_THREADS = 3
"""Threads of an actor: `run`, `stop` and `where` may be called at once."""


@dataclass
class _KeptWorker:
    name: str
    policy: RestartPolicy
    actor: Any = None
    run: Any = None
    """The reference to the result of `run`; None between two lives."""
    where: Any = None
    """The reference to the result of `where`; None once it is known."""
    started: float = field(default_factory=time.monotonic)
    start_at: float = 0.0


class WorkersOnRay:
    """Keeps workers on the cluster to which this process is connected. One thread uses it."""

    def __init__(self, ray: ModuleType, config: FleetConfig, start: WorkerStart) -> None:
        self._ray = ray
        self._config = config
        self._start = start
        self._token = secrets.token_hex(3)
        self._workers: list[_KeptWorker] = []
        self._leaving: list[_KeptWorker] = []
        self._made = 0
        self._say_at = time.monotonic() + _SAY_WAITING_S
        self._actors = ray.remote(
            num_cpus=_CPUS,
            max_restarts=-1,
            max_task_retries=-1,
            max_concurrency=_THREADS,
            scheduling_strategy="SPREAD",
        )(WorkerActor)

    def keep(self, count: int) -> None:
        """Have `count` workers from now on: start the missing ones, or drain the newest ones."""
        while len(self._workers) < count:
            self._made += 1
            name = f"worker-{self._token}-{self._made}"
            self._workers.append(
                _KeptWorker(name, RestartPolicy(self._config.supervisor.restart_attempts, random.Random()))
            )
        while len(self._workers) > count:
            self._leave(self._workers.pop())

    def look(self, wait_s: float) -> None:
        """Start the workers that are due, and wait at most `wait_s` for a worker to start or end.

        Raises `FleetError` for a worker that a restart cannot cure.
        """
        for worker in self._workers:
            if worker.run is None and time.monotonic() >= worker.start_at:
                self._run(worker)
        waited = [worker.run for worker in (*self._workers, *self._leaving) if worker.run is not None]
        waited += [worker.where for worker in self._workers if worker.where is not None]
        if not waited:
            time.sleep(wait_s)
            return
        ready = set(self._ray.wait(waited, num_returns=len(waited), timeout=wait_s)[0])
        self._note_places(ready)
        self._note_ends(ready)
        self._say_waiting()

    def drain(self, deadline_s: float) -> None:
        """Tell all workers to drain and wait for their ends, at most `deadline_s`. Then end the actors."""
        self.keep(0)
        until = time.monotonic() + deadline_s
        while self._leaving and time.monotonic() < until:
            self.look(0.1)
        for worker in self._leaving:
            log.warning("%s has not ended within %.0f s; its guard ends it", worker.name, deadline_s)
            self._ray.kill(worker.actor)

    def _run(self, worker: _KeptWorker) -> None:
        if worker.actor is None:
            name = f"{self._start.fleet_id}-{worker.name}"
            worker.actor = self._actors.options(name=name).remote(worker.name, self._start)
        worker.run, worker.where = worker.actor.run.remote(), worker.actor.where.remote()
        worker.started = time.monotonic()

    def _leave(self, worker: _KeptWorker) -> None:
        """Drain a worker. Kill the actor of a worker that has not started on a node: it has nothing to drain."""
        if worker.actor is not None and worker.run is not None and worker.where is None:
            worker.actor.stop.remote()
            self._leaving.append(worker)
        elif worker.actor is not None:
            self._ray.kill(worker.actor)

    def _note_places(self, ready: set[Any]) -> None:
        for worker in self._workers:
            if worker.where in ready:
                with suppress(self._ray.exceptions.RayError):
                    log.info("%s runs on %s, in actor pid %d", worker.name, *self._ray.get(worker.where))
                worker.where = None

    def _note_ends(self, ready: set[Any]) -> None:
        for worker in [worker for worker in self._leaving if worker.run in ready]:
            self._leaving.remove(worker)
            actor = worker.actor
            log.info("%s has left: %s", worker.name, self._end(worker)[0])
            self._ray.kill(actor)
        for worker in self._workers:
            if worker.run in ready:
                self._start_again(worker, *self._end(worker))

    def _end(self, worker: _KeptWorker) -> tuple[str, ExitCode | None]:
        """Return what `told` says of a worker's end. Forget an actor that is dead for good."""
        try:
            return told(self._ray.get(worker.run))
        except self._ray.exceptions.RayActorError as error:
            worker.actor = None
            return "its actor is dead: " + " ".join(str(error).split())[:300], None
        finally:
            worker.run = worker.where = None

    def _start_again(self, worker: _KeptWorker, end: str, final: ExitCode | None) -> None:
        if final is not None:
            raise FleetError(f"{worker.name}: {end}", final)
        delay_s = worker.policy.after_death(time.monotonic() - worker.started)
        if delay_s is None:
            raise FleetError(
                f"{worker.name} ended {worker.policy.deaths_in_window} times within "
                f"{WINDOW_S:g} s of running (last: {end}) and is given up; "
                "repair it, or raise supervisor.restart_attempts",
                ExitCode.CRASH_LOOP,
            )
        log.warning("%s ended: %s; it starts again in %.2f s", worker.name, end, delay_s)
        worker.start_at = time.monotonic() + delay_s

    def _say_waiting(self) -> None:
        if time.monotonic() < self._say_at:
            return
        self._say_at = time.monotonic() + _SAY_WAITING_S
        if waiting := sum(worker.where is not None for worker in self._workers):
            log.warning(
                "%d of %d workers wait for a node with a free CPU; `ray status` shows what the cluster has",
                waiting,
                len(self._workers),
            )


def told(end: WorkerEnd) -> tuple[str, ExitCode | None]:
    """Return how a worker ended, in words, and its exit code where a restart cannot cure it."""
    words = describe_end(end.returncode) + (f": {end.sentence}" if end.sentence else "")
    return words, ExitCode(end.returncode) if end.announced and end.returncode in FINAL else None


def keep_workers(
    workers: WorkersOnRay, wanted: Callable[[], int], stopping: Callable[[], bool], drain_s: float
) -> None:
    """Keep as many workers as `wanted` says, until `stopping`. Then drain them, for at most `drain_s`."""
    while not stopping():
        workers.keep(wanted())
        workers.look(0.25)
    workers.drain(drain_s)
