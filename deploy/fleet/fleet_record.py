"""The writer of fleet.json: it records the running processes whenever one starts or ends."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator
from typing import Any

from headrace.deploy.process.supervisor import Service, ServiceState
from headrace.deploy.run.fleet_file import FleetFile, ProcessEntry, WaitingEntry, continue_fleet
from headrace.deploy.run.run_dir import RunDir
from headrace.schemas.accounts.process_state import MOST_WORDS
from headrace.schemas.errors import RunDirError

log = logging.getLogger("headrace.supervisor")

NUMBERS_INTERVAL_S = 10.0
"""Seconds between two writes of the run's progress; all other changes are written at once."""


class FleetRecord:
    """The content of fleet.json. Each change is on disk before the method returns.

    A full disk, or a removed run directory, does not stop a running fleet. The error is logged once, and the file is
    written as soon as that is possible again. Only a new life needs its number on disk first.
    """

    def __init__(self, run_dir: RunDir, fleet_id: str, config_origin: str | None) -> None:
        self._path = run_dir.fleet_json
        self.content: FleetFile = continue_fleet(run_dir, fleet_id)
        self.content.supervisor_pid, self.content.started, self.content.config = os.getpid(), time.time(), config_origin
        self.content.write(self._path)
        self._stale = False
        self._numbers_due = 0.0

    def note(self, **fields: object) -> None:
        """Change fields of the content (`state`, `endpoints`, `redis_url`)."""
        self.content = self.content.model_copy(update=fields)
        try:
            self.content.write(self._path)
            self._stale = False
        except RunDirError as error:
            if not self._stale:
                log.error("fleet.json is out of date: %s", error)
            self._stale = True

    def note_numbers(self, env_steps: int, best_return: float | None) -> None:
        """Record the run's progress. It is on disk within `NUMBERS_INTERVAL_S`."""
        known = self.content.best_return
        best = max((value for value in (known, best_return) if value is not None), default=None)
        if (env_steps, best) == (self.content.env_steps, known):
            return
        is_first = not self.content.env_steps
        self.content = self.content.model_copy(update={"env_steps": env_steps, "best_return": best})
        if is_first or time.monotonic() >= self._numbers_due:
            self._numbers_due = time.monotonic() + NUMBERS_INTERVAL_S
            self.note()

    def note_redis(self, away_s: float) -> None:
        """Record since when Redis has not answered, if that is `away_s` ago; 0: it answers."""
        if bool(away_s) != (self.content.redis_away_unix_s is not None):
            self.note(redis_away_unix_s=time.time() - away_s if away_s else None)

    def next_incarnation(self, name: str, above: int = 0) -> int:
        """Count one more life of `name`, on disk first, so that no number is given twice. Raises `RunDirError`.

        The number is above `above`.
        """
        number = max(self.content.incarnations.get(name, 0), above) + 1
        self.content = self.content.model_copy(update={"incarnations": {**self.content.incarnations, name: number}})
        self.content.write(self._path)
        return number

    def note_processes(self, services: Iterable[Service]) -> None:
        """Record which processes live and which wait for another life."""
        services = list(services)
        self.note(
            processes=[entry for service in services for entry in _living(service)],
            waiting=[WaitingEntry(**_known(s), state=s.state.value) for s in services if s.child is None],
        )


def _living(service: Service) -> Iterator[ProcessEntry]:
    state = "draining" if service.state is ServiceState.STOPPING else "running"
    for child in (service.child, *service.zombies):
        if child is not None:
            yield ProcessEntry(
                **_known(service),
                incarnation=child.incarnation,
                pid=child.pid,
                started=child.started_unix,
                state=state if child is service.child else "silent",
            )


def _known(service: Service) -> dict[str, Any]:
    """Return what is known of a process, whether it lives or not."""
    return {
        "name": service.spec.name,
        "role": service.spec.role.value,
        "slot": service.spec.slot,
        "restarts": service.restarts,
        "last_words": service.last_words[:MOST_WORDS],
        "recent_deaths": service.policy.deaths_in_window,
    }
