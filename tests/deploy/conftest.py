"""Small real processes and a supervisor over them."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from headrace.deploy.process import restarts
from headrace.deploy.process.child import Child
from headrace.deploy.process.event_loop import EventLoop
from headrace.deploy.process.supervisor import ProcessSpec, Role, Service, Supervisor
from headrace.schemas.settings.config import SupervisorSection
from support.waiting import TIMEOUT_S

SECTION = SupervisorSection(
    restart_attempts=3,
    stop_timeout_s=0.3,
)


@dataclass
class Notes:
    """An observer that remembers what it was told."""

    lives: dict[str, int] = field(default_factory=dict)
    ends: list[tuple[str, int, int]] = field(default_factory=list)
    """(name, incarnation, return code)."""
    changes: int = 0
    delivered: set[int] = field(default_factory=set)
    """Lives of workers that have delivered."""

    def next_incarnation(self, name: str) -> int:
        self.lives[name] = self.lives.get(name, 0) + 1
        return self.lives[name]

    def changed(self) -> None:
        self.changes += 1

    def has_delivered(self, service: Service, child: Child) -> bool:
        return child.incarnation in self.delivered

    def ended(self, service: Service, child: Child, returncode: int) -> None:
        self.ends.append((service.spec.name, child.incarnation, returncode))


@dataclass
class Nursery:
    """A supervisor with all that belongs to it."""

    loop: EventLoop
    supervisor: Supervisor
    notes: Notes
    logs: Path

    def start(self, script: str, name: str = "child", role: Role = Role.BROKER, slot: int | None = None) -> Service:
        """Supervise `python -c script`; the script gets its incarnation as argv[1]."""
        return self.supervisor.start(
            ProcessSpec(name, role, lambda life: [sys.executable, "-c", script, str(life)], slot=slot)
        )

    def until(self, done: object) -> None:
        """Turn the loop until `done()`, which must happen."""
        assert callable(done)
        assert self.loop.turn_until(done, TIMEOUT_S), "it did not happen in time"

    def says(self, name: str, line: str, times: int = 1) -> bool:
        """Return whether the process has logged `line` at least `times` times."""
        path = self.logs / f"{name}.log"
        return path.exists() and path.read_text().splitlines().count(line) >= times


def nursery_in(logs: Path, section: SupervisorSection = SECTION) -> Nursery:
    loop, notes = EventLoop(), Notes()
    return Nursery(loop, Supervisor(loop, section, 0.2, logs, notes, random.Random(0)), notes, logs)


@pytest.fixture
def nursery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nursery]:
    monkeypatch.setattr(restarts, "BACKOFF_S", 0.01)
    made = nursery_in(tmp_path)
    yield made
    made.supervisor.kill()
    assert made.loop.turn_until(made.supervisor.gone, TIMEOUT_S), "a child outlived its test"
