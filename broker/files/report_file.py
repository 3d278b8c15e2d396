"""run_dir/report.json: what Redis should hold of the fleet, there while Redis is away or refuses. Mode 0600.

The reporter's thread writes it at each report of the broker, and removes it once Redis has everything. So whoever reads
the fleet's numbers (`FleetView`) has them, with Redis or without. It is there too while the supervisor alone cannot
reach Redis, as fleet.json says.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson
from pydantic import BaseModel, ConfigDict, FiniteFloat, ValidationError

from headrace.broker.redis.rows import ReceivedRow, fields_of
from headrace.schemas.basics.run_files import read_object, read_regular, replace_private

_BYTES_PER_S = 1_000_000
"""A pause after each write is so long that the file takes no more of the disk in the long run."""


@dataclass(frozen=True, slots=True)
class RedisAway:
    """Since when the broker cannot write to Redis, and why."""

    since_unix_s: float
    reason: str


class ToldByBroker(BaseModel):
    """The content of the file: hashes and learners' rows as Redis should hold them, by the names of keys and ids."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    fleet_id: str
    since_unix_s: FiniteFloat
    reason: str
    reported_unix_s: FiniteFloat
    expires_unix_s: FiniteFloat
    """Unix time (s) at which gauges and the like expire, as in Redis."""
    hashes: dict[str, dict[str, str]]
    rows: list[tuple[str, dict[str, str]]] = []
    """The newest rows that Redis lacks, the oldest first."""

    @property
    def away(self) -> RedisAway:
        """Return since when Redis is away, and why."""
        return RedisAway(self.since_unix_s, self.reason)


class ReportFile:
    """The file of one fleet. One thread at a time."""

    def __init__(self, run_dir: Path, fleet_id: str, live_s: float) -> None:
        self._path = file_path(run_dir)
        self._fleet_id, self._live_s = fleet_id, live_s
        self._is_there = True
        self._not_before = 0.0

    @property
    def is_due(self) -> bool:
        """Return whether the pause after the last write is over."""
        return time.monotonic() >= self._not_before

    def write(
        self,
        away: RedisAway,
        reported_unix_s: float,
        hashes: Mapping[str, Mapping[str, str]],
        rows: Sequence[ReceivedRow],
    ) -> None:
        """Replace the file, and begin its pause. Raises `OSError`."""
        content = {
            "fleet_id": self._fleet_id,
            "since_unix_s": away.since_unix_s,
            "reason": away.reason,
            "reported_unix_s": reported_unix_s,
            "expires_unix_s": reported_unix_s + self._live_s,
            "hashes": hashes,
            "rows": [("{}-{}".format(*row.version), fields_of(row)) for row in rows],
        }
        text = orjson.dumps(content)
        self._is_there, self._not_before = True, time.monotonic() + len(text) / _BYTES_PER_S
        replace_private(self._path, text)

    def asked(self) -> RedisAway | None:
        """Return since when the supervisor cannot reach Redis; None while it can, and without one."""
        since = read_object(self._path.with_name("fleet.json")).get("redis_away_unix_s")
        reason = "it answers the broker, and not the supervisor"
        return RedisAway(since, reason) if isinstance(since, float) else None

    def remove(self) -> None:
        """Remove the file, if it may be there. Raises `OSError`."""
        if self._is_there:
            self._path.unlink(missing_ok=True)
            self._is_there = False


def file_path(run_dir: Path) -> Path:
    """Return the path of the file in `run_dir`."""
    return run_dir / "report.json"


def read_report_file(run_dir: Path, fleet_id: str) -> ToldByBroker | None:
    """Read what the broker of this fleet tells while Redis is away; None where there is nothing, or nothing usable."""
    try:
        told = ToldByBroker.model_validate_json(read_regular(file_path(run_dir)))
    except (OSError, ValidationError):
        return None
    return told if told.fleet_id == fleet_id else None
