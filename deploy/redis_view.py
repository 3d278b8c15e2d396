"""The state of a fleet in Redis, read as of one moment. `up`, `top` and `audit` use it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.broker.redis_client import REDIS_FAILURES, RedisReader, connect, in_words
from headrace.broker.redis_parser import HashParser, SourceKey
from headrace.schemas import redis_keys as keys
from headrace.schemas.errors import RedisUnavailableError
from headrace.schemas.ledger import FleetLedger, LedgerRow, add_up

READ_TIMEOUT_S = 2.0

_READ = (
    keys.FLEET,
    keys.LEDGER,
    keys.TOTALS,
    keys.SOURCES,
    keys.GAUGES,
    keys.WORKERS,
    keys.LEASE,
    keys.INCARNATIONS,
)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a fleet at one moment. It is empty before the broker's first report.

    `rows` and `sources` are by (slot, incarnation), `workers` and `incarnations` by slot. `garbage` has a sentence for
    each value in Redis that could not be read and is therefore missing here.
    """

    fleet_id: str = ""
    rows: Mapping[SourceKey, LedgerRow] = field(default_factory=dict)
    fleet: FleetLedger = field(default_factory=FleetLedger)
    gauges: Mapping[str, float] = field(default_factory=dict)
    totals: Mapping[str, int] = field(default_factory=dict)
    sources: Mapping[SourceKey, Mapping[str, int]] = field(default_factory=dict)
    workers: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    lease: Mapping[str, Any] = field(default_factory=dict)
    incarnations: Mapping[int, int] = field(default_factory=dict)
    reported_unix_s: float | None = None
    """When the broker last reported, by its clock; None before the first report."""
    garbage: tuple[str, ...] = ()


class FleetView:
    """Reads one fleet's keys. It may be kept and read again; one thread at a time."""

    def __init__(self, url: str, fleet_id: str) -> None:
        self._url = keys.without_password(url)
        self._fleet_id = fleet_id
        self._reader = RedisReader(connect(url, READ_TIMEOUT_S))

    def read(self) -> Snapshot:
        """Read the fleet as it is now. Waits some seconds at most. Raises `RedisUnavailableError`."""
        try:
            raw, wrong = self._reader.hashes_at_once({key.name: keys.key_name(self._fleet_id, key) for key in _READ})
        except REDIS_FAILURES as error:
            raise RedisUnavailableError(self._url, in_words(error), READ_TIMEOUT_S) from error
        values = HashParser(garbage=wrong)
        rows = values.rows(raw["ledger"])
        return Snapshot(
            fleet_id=self._fleet_id,
            rows=rows,
            fleet=add_up(rows),
            gauges=values.gauges(raw["gauges"]),
            totals=values.totals(raw["totals"]),
            sources=values.sources(raw["sources"]),
            workers=values.workers(raw["workers"]),
            lease=values.lease(raw["lease"]),
            incarnations=values.incarnations(raw["incarnations"]),
            reported_unix_s=values.moment("fleet", raw["fleet"].get(b"reported_unix_s")),
            garbage=tuple(values.garbage),
        )

    def close(self) -> None:
        """Close the connection."""
        self._reader.client.close()

    def __enter__(self) -> FleetView:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
