"""The newest tasks of the fleet: the broker takes them from a teacher, keeps them, and hands them to workers."""

from __future__ import annotations

import logging
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from headrace.broker.batches.broker_observer import BrokerObserver
from headrace.broker.batches.source import Peer, Source
from headrace.broker.reports.fleet_reports import FleetReports
from headrace.broker.sessions.core import BrokerCore
from headrace.schemas.basics.bounds import EpochOrNone
from headrace.schemas.basics.counted_warnings import CountedWarnings
from headrace.schemas.basics.run_files import read_regular, replace_private
from headrace.schemas.credentials.tokens import digest_of, same_token
from headrace.schemas.errors import is_there
from headrace.schemas.messages import Fenced, Reject, Tasks, TasksAck, TeacherHello

log = logging.getLogger(__name__)

_RETRY_S = 1.0
"""Seconds between two tries to write to a file what Redis has."""


class KeptTasks(BaseModel):
    """State that outlives a broker: the epoch of the newest teacher, the digest of its token, and the newest tasks."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")
    epoch: EpochOrNone = 0
    teacher: str = ""
    tasks: Tasks = Tasks(version=(0, 0))


class TaskBoard(BrokerObserver):
    """Answers teachers once the file at `path` has what they are told, so no epoch is given out twice.

    `reports` has the same for Redis. A broker that starts takes the newer of both.
    """

    def __init__(self, core: BrokerCore, path: Path, reports: FleetReports) -> None:
        self._core, self._path, self._reports = core, path, reports
        self._warnings = CountedWarnings(log)
        self._knows_redis, self._compare_at = False, 0.0
        kept = _parsed(read_regular(path) if is_there(path) else b"", path.name)
        self._take(kept, kept.model_dump_json())
        self.tick(0.0)
        core.handlers |= {TeacherHello: self._on_hello, Tasks: self._on_tasks}

    def tick(self, now: float) -> None:
        """Compare the tasks with those in Redis, once it has answered."""
        saved = self._reports.saved_tasks
        if saved is not None and not self._knows_redis and now >= self._compare_at:
            self._compare_at = now + _RETRY_S
            newest = max(self._kept, _parsed(saved, "Redis"), key=lambda kept: (kept.epoch, kept.tasks.version))
            self._knows_redis = not newest.epoch or self._keep(newest)

    def reported(self, source: Source) -> None:
        """Send the newest tasks to a worker that has older ones."""
        if (source.figures.beat.tasks or (0, 0)) < self._kept.tasks.version:
            self._core.outbox.send(source.peer, self._frames)

    def _on_hello(self, peer: Peer, hello: TeacherHello, now: float) -> None:
        """Give a teacher an epoch above all that are known, or again its own."""
        core, kept, own = self._core, self._kept, digest_of(hello.token)
        if not core.workers.same_fleet(peer, hello.fleet_id or core.workers.fleet_id):
            return
        if not (kept.epoch or self._knows_redis):
            self._delay(peer, "Redis, which may know of a newer publisher of tasks, has not answered yet")
            return
        epoch = 1 + max([kept.epoch, *((source.figures.beat.tasks or (0, 0))[0] for source in core.live())])
        if same_token(kept.teacher, own) or self._keep(KeptTasks(epoch=epoch, teacher=own, tasks=kept.tasks), peer):
            core.outbox.send(peer, TasksAck(version=(self._kept.epoch, 0)))

    def _on_tasks(self, peer: Peer, told: Tasks, now: float) -> None:
        """Keep newer tasks, and send them to all workers. An acknowledgement says which are kept."""
        kept, outbox, is_newer = self._kept, self._core.outbox, told.version > self._kept.tasks.version
        if told.version[0] < kept.epoch:
            detail = f"a newer publisher of tasks (epoch {kept.epoch}) has taken over; this one must stop"
            outbox.send(peer, Fenced(detail=detail))
        elif not is_newer or self._keep(KeptTasks(epoch=told.version[0], teacher=kept.teacher, tasks=told), peer):
            for source in self._core.live() if is_newer else ():
                outbox.send(source.peer, self._frames)
            outbox.send(peer, TasksAck(version=self._kept.tasks.version))

    def _keep(self, kept: KeptTasks, peer: Peer | None = None) -> bool:
        """Write this to the file, and have Redis get it. Return whether the file has it; if not, tell `peer` why."""
        text = kept.model_dump_json()
        try:
            replace_private(self._path, text.encode())
        except OSError as error:
            problem = f"{self._path} cannot be written ({error.strerror or error})"
            self._warnings.warn(b"", "file", f"{problem}: publishers of tasks wait")
            self._delay(peer, problem)
            return False
        self._take(kept, text)
        return True

    def _take(self, kept: KeptTasks, text: str) -> None:
        self._kept, self._frames = kept, kept.tasks.frames()
        self._reports.tasks = {"newest": text} if kept.epoch else {}

    def _delay(self, peer: Peer | None, problem: str) -> None:
        """Tell a teacher, which asks again, why it gets no acknowledgement yet."""
        self._core.outbox.send(peer, Reject(code="later", detail=problem, fatal=False))


def _parsed(text: bytes, where: str) -> KeptTasks:
    try:
        return KeptTasks.model_validate_json(text or b"{}")
    except ValueError as error:
        log.error("the tasks in %s are damaged (%s), and are left out", where, type(error).__name__)
        return KeptTasks()
