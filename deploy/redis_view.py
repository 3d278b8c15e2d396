"""The state of a fleet in Redis, read as of one moment. `up`, `top` and `audit` use it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ConfigDict, TypeAdapter

from headrace.broker.redis_client import REDIS_FAILURES, RedisReader, connect, in_words
from headrace.broker.redis_parser import HashParser, SourceKey, finite
from headrace.schemas import redis_keys as keys
from headrace.schemas.errors import RedisUnavailableError
from headrace.schemas.ledger import FleetLedger, LedgerRow, add_up
from headrace.schemas.logged_metrics import LoggedMetric, RowValues

READ_TIMEOUT_S = 2.0

_ROW_VALUES: TypeAdapter[dict[str, float]] = TypeAdapter(RowValues, config=ConfigDict(allow_inf_nan=False))

_READ = (
    keys.FLEET,
    keys.LEDGER,
    keys.TOTALS,
    keys.SOURCES,
    keys.GAUGES,
    keys.WORKERS,
    keys.LEASE,
    keys.INCARNATIONS,
    keys.METRICS,
    keys.POLICIES,
)

MOST_ROWS_AT_ONCE = 500


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
    metrics: Mapping[str, LoggedMetric] = field(default_factory=dict)
    """Metrics that callbacks have logged, by name, merged over all workers."""
    policies: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Statistics of the returns by module id; empty in envs of one agent."""
    reported_unix_s: float | None = None
    """Unix time (s) of the broker's last report, by the broker's clock; None before the first."""
    garbage: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LearnerRowView:
    """A row that a learner logged.

    `unix_s` and `env_steps` are the time and the fleet's env steps when the broker got it.
    """

    epoch: int
    number: int
    unix_s: float
    env_steps: int
    weights_seq: int
    values: Mapping[str, float]

    @property
    def identity(self) -> tuple[int, int]:
        """Return (epoch, number), which rises from row to row."""
        return (self.epoch, self.number)


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
            metrics=values.metrics(raw["metrics"]),
            policies=values.policies(raw["policies"]),
            reported_unix_s=values.moment("fleet", raw["fleet"].get(b"reported_unix_s")),
            garbage=tuple(values.garbage),
        )

    def learner_rows(self, after: tuple[int, int] = (0, 0)) -> list[LearnerRowView]:
        """Return the rows of learners after (epoch, number), the oldest first, 500 at most.

        A row that cannot be read has no values. Waits some seconds at most. Raises `RedisUnavailableError`.
        """
        key = keys.key_name(self._fleet_id, keys.LEARNER_ROWS)
        try:
            entries = self._reader.entries(key, "{}-{}".format(*after), MOST_ROWS_AT_ONCE)
        except REDIS_FAILURES as error:
            raise RedisUnavailableError(self._url, in_words(error), READ_TIMEOUT_S) from error
        return [_learner_row(*entry) for entry in entries]

    def close(self) -> None:
        """Close the connection."""
        self._reader.client.close()

    def __enter__(self) -> FleetView:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _learner_row(identity: bytes, fields: Mapping[bytes, bytes]) -> LearnerRowView:
    epoch, number = map(int, identity.split(b"-"))  # Redis itself makes sure of this form
    try:
        return LearnerRowView(
            epoch=epoch,
            number=number,
            unix_s=finite(fields[b"unix_s"].decode()),
            env_steps=int(fields[b"env_steps"]),
            weights_seq=int(fields[b"weights_seq"]),
            values=_ROW_VALUES.validate_json(fields[b"values"]),
        )
    except (KeyError, ValueError):  # pydantic's ValidationError is a ValueError
        return LearnerRowView(epoch, number, 0.0, 0, 0, {})
