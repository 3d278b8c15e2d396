"""Everything known about a fleet at one moment, from Redis and from its run directory if that is on this machine."""

from __future__ import annotations

import math
import platform
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from headrace.deploy.monitoring.processes import STOPPED, SUPERVISOR, free_bytes, processes_of
from headrace.deploy.process.proc_stat import is_alive
from headrace.deploy.report.summary import read_run_facts
from headrace.deploy.run.fleet_file import FleetFile, read_fleet_file
from headrace.deploy.run.redis_server import serving
from headrace.deploy.run.redis_view import FleetView, LearnerRowView, Snapshot
from headrace.deploy.run.run_dir import is_locked
from headrace.schemas.accounts.process_state import ProcessState as ProcessState
from headrace.schemas.basics.closable import Closable
from headrace.schemas.basics.printable import to_paste
from headrace.schemas.basics.run_files import read_regular
from headrace.schemas.errors import HeadraceError, RedisContractError, RedisUnavailableError, absolute
from headrace.schemas.settings.config import FleetConfig

RING_S = 5
_KEPT = 24

NOT_STARTED = "the fleet has started none yet"
"""The `redis_error` of a fleet that starts its own Redis later."""


Entry = tuple[float, Mapping[str, float]]
"""(unix s by the broker's clock, gauges and totals by name)."""


class RecentHistory:
    """The newest two minutes of the ring in Redis that has an entry every 5 s. Reads only new entries."""

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque(maxlen=_KEPT)
        self._due = 0.0

    def read(self, view: FleetView, reported_unix_s: float | None) -> Sequence[Entry]:
        """Return the entries, the oldest first. `reported_unix_s`: the time of the broker's last report.

        Raises `RedisUnavailableError`.
        """
        now = time.monotonic()
        if reported_unix_s is not None and now >= self._due:
            oldest = reported_unix_s - _KEPT * RING_S
            after = self._entries[-1][0] if self._entries else oldest
            self._entries.extend(view.history(RING_S, max(after, oldest)))
            self._due = now + RING_S
        return tuple(self._entries)


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything known about a fleet at one moment.

    - snapshot: the state in Redis, as last read, or in the broker's file while Redis is away. `redis_age_s`: since when
      Redis lacks the newest.
    - processes: by name; empty if neither Redis nor a run directory lists them.
    - redis_error: why Redis could not be read, or refuses the broker; "" if all is well. `redis_back_s` is how long ago
      it answered again.
    - config, endpoints, run_dir: None or empty where the run directory is not on this machine.
    """

    unix_s: float
    snapshot: Snapshot = field(default_factory=Snapshot)
    processes: Mapping[str, ProcessState] = field(default_factory=dict)
    redis_error: str = ""
    redis_age_s: float = 0.0
    redis_back_s: float = math.inf
    redis_refusal: str = ""
    """Why Redis takes no writes, where no run directory tells what the broker knows; "" if it takes them."""
    config: FleetConfig | None = None
    endpoints: Mapping[str, str] = field(default_factory=dict)
    run_dir: Path | None = None
    recent: Sequence[Entry] = ()
    """(unix s, gauges and totals) of the newest two minutes, the oldest first, every 5 s."""
    disk_free_bytes: int | None = None
    redis_away_unix_s: float | None = None
    """Since when Redis has not answered the supervisor, as fleet.json says; None while it does."""
    waits_for: str = ""
    """Whom the start waits for, as fleet.json says."""
    failure: str = ""
    """The error that ended the run, in words."""
    learner_row: LearnerRowView | None = None
    """The newest row that a learner logged; None before the first."""

    @property
    def is_old(self) -> bool:
        """Return whether the snapshot is an old one, since neither Redis nor the broker's file has given one now."""
        return bool(self.redis_error) and self.snapshot.away is None

    def in_run_dir(self, command: str, place: str = "") -> str:
        """Return `command` with a place in the run directory, to paste; "" without the run directory."""
        return "" if self.run_dir is None else f"{command} {to_paste(self.run_dir / place)}"

    def setting(self, key: str) -> Any:
        """Return the value of a setting: of the run directory, or as the broker told it; None if it is not known.

        Redis may hold any plain value under this name.
        """
        return self.snapshot.settings.get(key) if self.config is None else self.config.value_of(key)


class FactsReader(Closable):
    """Reads the facts of a fleet repeatedly. The run directory names the fleet, or a Redis URL and the fleet's name do.

    A Redis that does not answer is a fact, not an error. One thread at a time.

    Raises `RunDirError` for a directory without a fleet.
    """

    def __init__(self, run_dir: Path | None = None, *, redis_url: str = "", fleet_id: str = "") -> None:
        self._run_dir = absolute(run_dir) if run_dir is not None else None
        if self._run_dir is not None:
            read_fleet_file(self._run_dir / "fleet.json")  # raises for a directory without a fleet
        self._url, self._fleet_id = redis_url, fleet_id
        self.view: FleetView | None = None
        """The view of the fleet's keys that `read` uses. The caller may use it between two calls of `read`."""
        self._snapshot = Snapshot()
        self._history = RecentHistory()
        self._recent: Sequence[Entry] = ()
        self._learner_row: LearnerRowView | None = None
        self._read_at = time.monotonic()
        self._back_at = -math.inf
        self._refusal = ""
        self._read_last = False

    def read(self) -> Facts:
        """Return the facts as they are now. Waits some seconds at most.

        Raises `RedisContractError`, and `RunDirError` once the run directory was removed.
        """
        fleet = self._read_fleet()
        error = self._read_redis(fleet)
        processes = self._snapshot.processes if not error else {}
        if fleet is not None and self._run_dir is not None and not _is_elsewhere_and_lives(self._snapshot.processes):
            processes = processes if _lives(fleet, processes) and processes else processes_of(fleet, self._run_dir)
        supervisor = processes.get(SUPERVISOR)
        told_free = supervisor.disk_free_bytes if supervisor is not None else None
        return Facts(
            unix_s=time.time(),
            snapshot=self._snapshot,
            processes=processes,
            redis_error=error,
            redis_age_s=self._redis_age_s() if error else 0.0,
            redis_back_s=max(0.0, time.monotonic() - self._back_at),
            redis_refusal=self._refusal,
            config=read_config(self._run_dir) if self._run_dir is not None else None,
            endpoints=fleet.endpoints if fleet is not None else {},
            run_dir=self._run_dir,
            recent=self._recent,
            disk_free_bytes=free_bytes(self._run_dir) if self._run_dir is not None else told_free,
            redis_away_unix_s=fleet.redis_away_unix_s if fleet is not None else None,
            waits_for=fleet.waits_for if fleet is not None else "",
            failure=_failure(self._run_dir) if self._run_dir is not None and _has_ended(fleet, supervisor) else "",
            learner_row=self._learner_row,
        )

    def _redis_age_s(self) -> float:
        away = self._snapshot.away
        return time.monotonic() - self._read_at if away is None else max(0.0, time.time() - away.since_unix_s)

    def close(self) -> None:
        """Close the connection to Redis."""
        if self.view is not None:
            self.view.close()
            self.view = None

    def _read_fleet(self) -> FleetFile | None:
        """Read fleet.json again: a run that is resumed may have another Redis."""
        if self._run_dir is None:
            return None
        fleet = read_fleet_file(self._run_dir / "fleet.json")
        if (fleet.redis_url, fleet.fleet_id) != (self._url, self._fleet_id):
            self.close()
            self._url, self._fleet_id = fleet.redis_url, fleet.fleet_id
            self._history = RecentHistory()
        return fleet

    def _read_redis(self, fleet: FleetFile | None) -> str:
        """Read the snapshot. Return the reason for a failure; "" if the read succeeded."""
        if not self._url:
            return NOT_STARTED
        try:
            if self.view is None:
                self.view = FleetView(self._url, self._fleet_id, self._run_dir)
            self._snapshot = self.view.read()
            self._learner_row = self.view.newest_learner_row() or self._learner_row
            if (away := self._snapshot.away) is not None:
                self._back_at = math.inf
                return away.reason
            self._recent = self._history.read(self.view, self._snapshot.reported_unix_s)
            self._refusal = self.view.refusal() if self._run_dir is None else ""
        except RedisContractError:
            raise
        except RedisUnavailableError as error:
            self._read_last_books(fleet)
            self._back_at = math.inf
            return error.reason
        self._read_at = time.monotonic()
        self._back_at = min(self._back_at, self._read_at)
        return ""

    def _read_last_books(self, fleet: FleetFile | None) -> None:
        """Read the final books of an ended run, once. Start its own Redis for the read if that has stopped too."""
        run_dir = self._run_dir
        if run_dir is None or fleet is None or fleet.state != STOPPED or is_locked(run_dir):
            self._read_last = False
        elif not self._read_last and self.view is not None:
            self._read_last = True
            with suppress(HeadraceError), serving(run_dir, self._url):
                self._snapshot = self.view.read()


@contextmanager
def facts_of_run(run_dir: Path) -> Iterator[FactsReader]:
    """Give a reader of a run's facts. If the run has ended, start the fleet's own Redis within the block.

    Raises `RunDirError` for a directory without a fleet.
    """
    with ExitStack() as stack:
        url = read_fleet_file(run_dir / "fleet.json").redis_url
        if url and not is_locked(run_dir):
            stack.enter_context(serving(run_dir, url))
        yield stack.enter_context(FactsReader(run_dir))


def _failure(run_dir: Path) -> str:
    """Return the error that ended a run; "" where it ended in order, or nothing could be written."""
    error = read_run_facts(run_dir).get("error")
    return error if isinstance(error, str) else ""


def _has_ended(fleet: FleetFile | None, supervisor: ProcessState | None) -> bool:
    """Return whether the run has ended. Redis, which was read later than fleet.json, may be the first to tell it."""
    return STOPPED in (fleet and fleet.state, supervisor and supervisor.state)


def _lives(fleet: FleetFile, told: Mapping[str, ProcessState]) -> bool:
    """Return whether the fleet runs, and no earlier supervisor left `told` in Redis."""
    is_newest = SUPERVISOR not in told or told[SUPERVISOR].started_unix_s >= fleet.started
    return fleet.state != STOPPED and is_newest and is_alive(fleet.supervisor_pid)


def _is_elsewhere_and_lives(processes: Mapping[str, ProcessState]) -> bool:
    """Return whether a supervisor on another machine reported lately. It may share the run directory."""
    supervisor = processes.get(SUPERVISOR)
    return supervisor is not None and supervisor.host != platform.node()


def read_config(run_dir: Path) -> FleetConfig | None:
    """Return the resolved configuration of the run in a directory; None before there is one."""
    try:
        return FleetConfig.model_validate_json(read_regular(run_dir / "config.json"))
    except (OSError, ValidationError):
        return None
