"""The broker's state for Redis, the script call that merges a part of it, and what an earlier broker left there."""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
import redis

from headrace.broker.redis.blob import StoredBlob, weights_in
from headrace.broker.redis.client import RedisReader
from headrace.broker.redis.parser import HashParser, SourceKey
from headrace.broker.redis.scripts import MERGE
from headrace.schemas.accounts import redis_keys as keys
from headrace.schemas.accounts.consumer_groups import GroupBooks
from headrace.schemas.accounts.env_errors import EnvErrorRow
from headrace.schemas.accounts.folded_lives import FoldedLives
from headrace.schemas.accounts.ledger import LedgerRow
from headrace.schemas.accounts.lifetime_counters import folded_counters, row_counters
from headrace.schemas.accounts.logged_metrics import LoggedMetric, SumsOfLife
from headrace.schemas.accounts.runner_counters import Counters

log = logging.getLogger(__name__)

LIVE_S = 15.0
"""Seconds after which gauges, workers' states, returns by module and logged metrics expire if no broker reports."""

_APART = (keys.WEIGHTS_CURRENT, keys.LEARNER_ROWS)
_OF_BROKER = (key for key in keys.TABLE if key.writer == "broker" and "{" not in key.name)
_WRITTEN = tuple(key for key in _OF_BROKER if key not in _APART)
"""In the order in which the script names them."""
_AS_IN_BODY = ("gauges", "workers", "lease", "groups", "metrics", "policies", "task_figures")
"""Keys whose fields `_as_json` has as Redis holds them."""
_RINGS = [[seconds * 1000, most] for _, seconds, most in keys.RINGS]


@dataclass(frozen=True, slots=True)
class Report:
    """The changes of the broker's state since the last report. Do not change its contents after `offer`.

    - rows: ledger rows that changed, also those of dead incarnations. Their counters (`lifetime_counters.row_counters`)
      are reported with them.
    - counters: further cumulative counters by (slot, incarnation), such as accepted_bytes_total. A counter that the row
      has too is taken from the row.
    - folded: by slot, the folded lives that changed. Rows of lives in them are removed from Redis.
    - workers: states that changed, by slot; they go to Redis as JSON. workers_gone: slots without a worker.
    - incarnations and runner_state, by slot, lease, and tasks (the text of tasks.json as `newest`): all of them.
    - policies, metrics, metric_sums: all of them, by module id, name and slot. metric_sums None: those of earlier lives
      are not known yet, so metrics and sums in Redis stay.
    - env_errors, task_figures: all groups of failures of envs, by fingerprint, and the figures of tasks, by name. None:
      those in Redis are not known yet, and stay.
    - groups: the state of each consumer group besides the learner's, by name, and what changed in its books. A group
      that is missing is removed from Redis. None: the groups in Redis are not known yet, and stay.
    - events: news since the last report, each a flat dict.
    - refused: (peer, kind, count) of the messages refused most since the broker started.
    - joins_blocked: why no peer can join now; "" where peers can.
    - ended_unix_s: the time at which the broker stops in order, in its last report; else None.
    """

    rows: list[LedgerRow] = field(default_factory=list)
    counters: Mapping[SourceKey, Mapping[str, int]] = field(default_factory=dict)
    folded: Mapping[int, FoldedLives] = field(default_factory=dict)
    gauges: Mapping[str, float] = field(default_factory=dict)
    workers: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    workers_gone: Collection[int] = ()
    lease: Mapping[str, Any] = field(default_factory=dict)
    incarnations: Mapping[int, int] = field(default_factory=dict)
    runner_state: Mapping[int, Counters] = field(default_factory=dict)
    policies: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    metrics: Mapping[str, LoggedMetric] = field(default_factory=dict)
    metric_sums: Mapping[str, SumsOfLife] | None = None
    env_errors: Mapping[str, Mapping[str, Any]] | None = None
    tasks: Mapping[str, str] = field(default_factory=dict)
    task_figures: Mapping[str, Mapping[str, float]] | None = None
    groups: Mapping[str, GroupBooks] | None = None
    events: Sequence[Mapping[str, Any]] = ()
    refused: Sequence[tuple[str, str, int]] = ()
    joins_blocked: str = ""
    ended_unix_s: float | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a report, small enough that Redis stops for some milliseconds only.

    - is_first: it has the parts that every report has: gauges, lease, policies, metrics, figures of tasks and events.
    - clears_workers: remove all workers' states from Redis, except those in this part.
    - lives: by slot, lives in `folded` whose rows Redis may still have. group_lives: the same of each group.
    - env_errors_gone: groups that were summed up with others.
    - counters: names of all counters that Redis may have of these lives.
    """

    report: Report
    is_first: bool = True
    clears_workers: bool = True
    lives: Mapping[int, Sequence[int]] = field(default_factory=dict)
    group_lives: Mapping[str, Mapping[int, Sequence[int]]] = field(default_factory=dict)
    counters: Sequence[str] = ()
    env_errors_gone: Sequence[str] = ()


class MergeScript:
    """Sends the parts of reports by the MERGE script. The same part may be sent any number of times.

    about: further fields of `fleet`.
    """

    def __init__(
        self,
        client: redis.Redis,
        fleet_id: str,
        live_s: float = LIVE_S,
        clock: Callable[[], float] = time.time,
        about: Mapping[str, str] | None = None,
    ) -> None:
        self._clock = clock
        self._script = client.register_script(MERGE)
        self._keys = [keys.key_name(fleet_id, key) for key in _WRITTEN]
        self._fleet = {
            **(about or {}),
            "contract_version": str(keys.CONTRACT_VERSION),
            "fleet_id": fleet_id,
            "started_unix_s": f"{clock():.3f}",
        }
        self._live_ms = int(1000 * live_s)
        self._source = secrets.token_hex(8)
        self._number = 0
        self._newest = ""

    def __call__(
        self, part: Part, events: list[tuple[int, list[str]]], failures: int, *, after_last: bool = False
    ) -> set[str] | None:
        """Merge a part into Redis. Return the names of rows that are newer in Redis. May raise `REDIS_FAILURES`.

        after_last: write only if the last part that Redis got is the last one that this object sent; else return None.
        """
        self._number += 1
        now = self._clock()
        written = f"{self._source}/{self._number}"
        body = {
            **_as_json(part),
            "fleet": {**self._fields_of_fleet(part.report, now), "written": written},
            "after": self._newest if after_last else "",
            "live_ms": self._live_ms,
            "unix_ms": round(1000 * now),
            "rings": _RINGS,
            "event_source": self._source,
            "events": [{"number": number, "fields": fields} for number, fields in events],
        }
        if part.is_first:
            body["gauges"]["redis_failures"] = str(failures)
        answer: Any = self._script(keys=self._keys, args=[orjson.dumps(body)])
        if answer == b"other":
            return None
        self._newest = written
        return {name.decode() for name in answer}

    def _fields_of_fleet(self, report: Report, now: float) -> dict[str, str]:
        ended = {} if report.ended_unix_s is None else {"ended_unix_s": f"{report.ended_unix_s:.3f}"}
        refused = orjson.dumps(report.refused).decode()
        told = {"reported_unix_s": f"{now:.3f}", "refused": refused, "joins_blocked": report.joins_blocked}
        return self._fleet | told | ended

    def hashes_of(self, part: Part, unix_s: float) -> dict[str, dict[str, str]]:
        """Return the hashes, by the names of their keys, that an empty Redis would hold of a part, told at a time."""
        body = _as_json(part)
        own: dict[str, dict[str, int]] = body["row_counters"]
        of_lives = [(life, own.get(life, {}) | body["counters"].get(life, {})) for life in own | body["counters"]]
        of_lives += [(f"{slot}/0", lives["counters"]) for slot, lives in body["folded"].items()]
        totals: Counter[str] = Counter()
        for _, counters in of_lives:
            totals.update(counters)
        rows, lives = body["rows"], {slot: lives["text"] for slot, lives in body["folded"].items()}
        hashes = {
            "fleet": self._fields_of_fleet(part.report, unix_s),
            "ledger": {name: text for name, text in rows.items() if name.count("/") == 1},
            "group_ledger": {name: text for name, text in rows.items() if name.count("/") > 1},
            "folded": {name: text for name, text in lives.items() if "/" not in name},
            "group_folded": {name: text for name, text in lives.items() if "/" in name},
            "totals": {name: str(count) for name, count in totals.items() if count},
            "sources": {f"{life}/{name}": str(n) for life, counters in of_lives for name, n in counters.items() if n},
            "incarnations": {slot: str(number) for slot, number in body["incarnations"].items()},
            "errors": body["env_errors"],
        }
        return hashes | {name: body.get(name, {}) for name in _AS_IN_BODY}


def _as_json(part: Part) -> dict[str, Any]:
    """Return a part of a report as the MERGE script reads it: integers to compare, all else as text to store."""
    report, groups = part.report, part.report.groups or {}
    rows = {keys.source_name(row.slot, row.incarnation): row for row in report.rows}
    from_rows = {source: row_counters(row) for source, row in rows.items()}
    further: dict[str, dict[str, int]] = {}
    for (slot, incarnation), counters in report.counters.items():
        source = keys.source_name(slot, incarnation)
        said_by_row = from_rows.get(source, {})
        further[source] = {name: value for name, value in counters.items() if name not in said_by_row}
    body: dict[str, Any] = {
        "rows": {source: row.model_dump_json() for source, row in rows.items()}
        | {
            f"{name}/{keys.source_name(*life)}": row.model_dump_json()
            for name, books in groups.items()
            for life, row in books.rows.items()
        },
        "row_counters": from_rows,
        "counters": further,
        "folded": {str(slot): _folded_json(lives, part.lives.get(slot, ())) for slot, lives in report.folded.items()}
        | {
            f"{name}/{slot}": {**_folded_json(lives, part.group_lives.get(name, {}).get(slot, ())), "counters": {}}
            for name, books in groups.items()
            for slot, lives in books.folded.items()
        },
        "counter_names": list(part.counters),
        "workers": {str(slot): orjson.dumps(state).decode() for slot, state in report.workers.items()},
        "workers_gone": [str(slot) for slot in report.workers_gone],
        "clears_workers": part.clears_workers,
        "incarnations": {str(slot): incarnation for slot, incarnation in report.incarnations.items()},
        "runner_state": {str(slot): orjson.dumps(counters).decode() for slot, counters in report.runner_state.items()},
        "env_errors": {name: orjson.dumps(row).decode() for name, row in (report.env_errors or {}).items()},
        "env_errors_gone": list(part.env_errors_gone),
        "tasks": dict(report.tasks),
        "lease": {},
    }
    if not part.is_first:
        return body
    sums: dict[str, Any] = {} if report.metric_sums is None else {"metric_sums": _json_of(report.metric_sums)}
    if report.task_figures is not None:
        sums["task_figures"] = {task: orjson.dumps(own).decode() for task, own in report.task_figures.items()}
    if report.groups is not None:
        sums["groups"] = {name: books.state.model_dump_json(exclude_none=True) for name, books in groups.items()}
    return (
        body
        | sums
        | {
            "gauges": {name: repr(float(value)) for name, value in report.gauges.items() if math.isfinite(value)},
            "lease": {name: str(value) for name, value in report.lease.items()},
            "policies": {module_id: orjson.dumps(returns).decode() for module_id, returns in report.policies.items()},
            "metrics": _json_of(report.metrics),
        }
    )


def _folded_json(lives: FoldedLives, rows: Sequence[int]) -> dict[str, Any]:
    return {
        "text": lives.model_dump_json(),
        "highest": lives.highest,
        "lives": lives.lives,
        "rows": list(rows),
        "counters": folded_counters(lives),
    }


def _json_of(models: Mapping[str, LoggedMetric] | Mapping[str, SumsOfLife]) -> dict[str, str]:
    return {name: model.model_dump_json() for name, model in models.items()}


@dataclass(frozen=True, slots=True)
class SavedState:
    """The state in Redis when the reporter first reached it. Its form is checked; the frames are not decoded yet."""

    rows: dict[SourceKey, LedgerRow]
    folded: dict[int, FoldedLives]
    counters: dict[SourceKey, dict[str, int]]
    incarnations: dict[int, int]
    runner_state: dict[int, Counters]
    lease_epoch: int
    metric_sums: dict[str, SumsOfLife]
    env_errors: dict[str, EnvErrorRow]
    weights: StoredBlob | None
    tasks: bytes
    task_figures: dict[str, dict[str, float]]
    groups: dict[str, GroupBooks]


def read_saved_state(client: redis.Redis, fleet_id: str) -> SavedState:
    """Read what stands in Redis for this fleet. Log and leave out what cannot be read. May raise `REDIS_FAILURES`."""
    wanted = (
        keys.LEDGER,
        keys.FOLDED,
        keys.SOURCES,
        keys.INCARNATIONS,
        keys.LEASE,
        keys.RUNNER_STATE,
        keys.METRIC_SUMS,
        keys.ERRORS,
        keys.TASKS,
        keys.TASK_FIGURES,
        *keys.OF_GROUPS,
    )
    raw = RedisReader(client).hashes_at_once({key.name: keys.key_name(fleet_id, key) for key in wanted})
    values = HashParser()
    saved = SavedState(
        rows=values.rows(raw["ledger"]),
        folded=values.folded(raw["folded"]),
        counters=values.sources(raw["sources"]),
        incarnations=values.incarnations(raw["incarnations"]),
        runner_state=values.runner_state(raw["runner_state"]),
        lease_epoch=values.lease(raw["lease"]).get("epoch", 0),
        metric_sums=values.metric_sums(raw["metric_sums"]),
        env_errors=values.env_errors(raw["errors"]),
        weights=weights_in(client, fleet_id).load(),
        tasks=raw["tasks"].get(b"newest", b""),
        task_figures=values.task_figures(raw["task_figures"]),
        groups=values.groups(*(raw[key.name] for key in keys.OF_GROUPS)),
    )
    for sentence in values.garbage:
        log.error("left out a value in Redis: %s", sentence)
    return saved
