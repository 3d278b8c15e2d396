"""The broker's full state for Redis, and the one script call that merges it there."""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
import redis

from headrace.broker.redis_parser import SourceKey
from headrace.broker.redis_scripts import MERGE
from headrace.schemas import redis_keys as keys
from headrace.schemas.ledger import LedgerRow
from headrace.schemas.logged_metrics import LoggedMetric, SumsOfLife
from headrace.schemas.runner_counters import Counters

log = logging.getLogger(__name__)

_WRITTEN = (
    keys.FLEET,
    keys.LEDGER,
    keys.TOTALS,
    keys.SOURCES,
    keys.GAUGES,
    keys.WORKERS,
    keys.LEASE,
    keys.INCARNATIONS,
    keys.RUNNER_STATE,
    keys.EVENTS,
    keys.METRICS,
    keys.METRIC_SUMS,
    keys.POLICIES,
)


@dataclass(frozen=True, slots=True)
class Report:
    """The broker's full state for Redis. Do not change its contents after `offer`.

    - rows: all ledger rows, also those of dead incarnations. Their counters (`redis_keys.row_counters`) are reported
      with them.
    - counters: further cumulative counters by (slot, incarnation), such as bytes_total. A counter that the row has too
      is taken from the row.
    - workers and runner_state, by slot, and lease: go to Redis as JSON and text.
    - policies, metrics, metric_sums: go to Redis as JSON by module id, name and slot. metric_sums None: those of
      earlier lives are not known yet, so metrics and sums in Redis stay.
    - events: news since the last report, each a flat dict.
    """

    rows: list[LedgerRow] = field(default_factory=list)
    counters: Mapping[SourceKey, Mapping[str, int]] = field(default_factory=dict)
    gauges: Mapping[str, float] = field(default_factory=dict)
    workers: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    lease: Mapping[str, Any] = field(default_factory=dict)
    incarnations: Mapping[int, int] = field(default_factory=dict)
    runner_state: Mapping[int, Counters] = field(default_factory=dict)
    policies: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    metrics: Mapping[str, LoggedMetric] = field(default_factory=dict)
    metric_sums: Mapping[str, SumsOfLife] | None = None
    events: Sequence[Mapping[str, Any]] = ()


class MergeScript:
    """Sends a report by the MERGE script. The same report may be sent any number of times."""

    def __init__(self, client: redis.Redis, fleet_id: str) -> None:
        self._script = client.register_script(MERGE)
        self._keys = [keys.key_name(fleet_id, key) for key in _WRITTEN]
        self._skipped: set[bytes] = set()
        self._fleet = {
            "contract_version": str(keys.CONTRACT_VERSION),
            "fleet_id": fleet_id,
            "started_unix_s": f"{time.time():.3f}",
        }
        self._event_source = secrets.token_hex(8)

    def __call__(self, report: Report, events: list[tuple[int, list[str]]], failures: int) -> None:
        """Merge a report into Redis. May raise `REDIS_FAILURES`."""
        fleet = {**self._fleet, "reported_unix_s": f"{time.time():.3f}"}
        body = {
            **_as_json(report),
            "fleet": fleet,
            "event_source": self._event_source,
            "events": [{"number": number, "fields": fields} for number, fields in events],
        }
        body["gauges"]["redis_failures"] = str(failures)
        answer: Any = self._script(keys=self._keys, args=[orjson.dumps(body)])
        for name in set(answer) - self._skipped:
            log.error("counter %s in Redis is not a number and is left as it is; the audit will name it", name.decode())
            self._skipped.add(name)


def _as_json(report: Report) -> dict[str, Any]:
    """Return the parts of a report as the MERGE script reads them: integers to compare, all else as text to store."""
    rows = {keys.source_name(row.slot, row.incarnation): row for row in report.rows}
    from_rows = {source: keys.row_counters(row) for source, row in rows.items()}
    further: dict[str, dict[str, int]] = {}
    for (slot, incarnation), counters in report.counters.items():
        source = keys.source_name(slot, incarnation)
        said_by_row = from_rows.get(source, {})
        further[source] = {name: value for name, value in counters.items() if name not in said_by_row}
    sums = {} if report.metric_sums is None else {"metric_sums": _json_of(report.metric_sums)}
    return sums | {
        "rows": {source: row.model_dump_json() for source, row in rows.items()},
        "row_counters": from_rows,
        "counters": further,
        "gauges": {name: repr(float(value)) for name, value in report.gauges.items() if math.isfinite(value)},
        "workers": {str(slot): orjson.dumps(state).decode() for slot, state in report.workers.items()},
        "lease": {name: str(value) for name, value in report.lease.items()},
        "incarnations": {str(slot): incarnation for slot, incarnation in report.incarnations.items()},
        "policies": {module_id: orjson.dumps(returns).decode() for module_id, returns in report.policies.items()},
        "metrics": _json_of(report.metrics),
        "runner_state": {str(slot): orjson.dumps(counters).decode() for slot, counters in report.runner_state.items()},
    }


def _json_of(models: Mapping[str, LoggedMetric] | Mapping[str, SumsOfLife]) -> dict[str, str]:
    return {name: model.model_dump_json() for name, model in models.items()}
