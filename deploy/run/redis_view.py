"""The state of a fleet as of one moment: in Redis, or in the run directory while Redis is away. All commands use it."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter
from redis.exceptions import NoPermissionError

from headrace.broker.files.report_file import RedisAway, ToldByBroker, read_report_file
from headrace.broker.redis.client import RedisReader, connect, naming_failures
from headrace.broker.redis.parser import Hash, HashParser, SourceKey, finite
from headrace.schemas.accounts import redis_keys as keys
from headrace.schemas.accounts.consumer_groups import GroupBooks
from headrace.schemas.accounts.env_errors import INFO_LEFT_OUT, EnvErrorRow
from headrace.schemas.accounts.folded_lives import FoldedLives
from headrace.schemas.accounts.ledger import FleetLedger, LedgerRow, add_up
from headrace.schemas.accounts.logged_metrics import LoggedMetric, RowValues
from headrace.schemas.accounts.process_state import ProcessState
from headrace.schemas.basics.closable import Closable
from headrace.schemas.basics.headrace_version import MOST_VERSION
from headrace.schemas.basics.printable import one_line
from headrace.schemas.basics.process_usage import crowded_cores
from headrace.schemas.errors import RedisContractError, RedisUnavailableError
from headrace.schemas.settings.redis_url import without_password

READ_TIMEOUT_S = 2.0

_ROW_VALUES: TypeAdapter[dict[str, float]] = TypeAdapter(RowValues, config=ConfigDict(allow_inf_nan=False))

_OF_BROKER_ALONE = (keys.RUNNER_STATE, keys.METRIC_SUMS)
_WHILE_LIVE = ("gauges", "workers", "policies", "metrics")
"""Keys that expire some seconds after the broker's last report."""
_READ = tuple(key for key in keys.TABLE if "{" not in key.name and key.type == "hash" and key not in _OF_BROKER_ALONE)

MOST_ROWS_AT_ONCE = 500
MOST_EVENTS = 1000
_LONGEST_TEXT = 200


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a fleet at one moment. It is empty before the broker's first report.

    `rows` and `sources` are by (slot, incarnation), `folded`, `workers` and `incarnations` by slot. `garbage` has a
    sentence for each value in Redis that could not be read and is therefore missing here.
    """

    fleet_id: str = ""
    rows: Mapping[SourceKey, LedgerRow] = field(default_factory=dict)
    folded: Mapping[int, FoldedLives] = field(default_factory=dict)
    """Older lives of each slot, which have no rows of their own any more."""
    fleet: FleetLedger = field(default_factory=FleetLedger)
    gauges: Mapping[str, float] = field(default_factory=dict)
    totals: Mapping[str, int] = field(default_factory=dict)
    sources: Mapping[SourceKey, Mapping[str, int]] = field(default_factory=dict)
    workers: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    lease: Mapping[str, Any] = field(default_factory=dict)
    """The learner's lease. It tells `connected` only while the gauges have not expired, so while a broker reports."""
    groups: Mapping[str, GroupBooks] = field(default_factory=dict)
    """The books of consumer groups besides the learner's, by name."""
    incarnations: Mapping[int, int] = field(default_factory=dict)
    metrics: Mapping[str, LoggedMetric] = field(default_factory=dict)
    """Metrics that callbacks have logged, by name, merged over all workers."""
    errors: Mapping[str, EnvErrorRow] = field(default_factory=dict)
    """Failures of envs in groups, by fingerprint, and what infos go without."""
    policies: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Statistics of the returns by module id; empty in envs of one agent."""
    task_figures: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Episodes, their returns and lengths, and failures of envs, by the name of the task; empty without tasks."""
    processes: Mapping[str, ProcessState] = field(default_factory=dict)
    """The supervisor's processes by name; empty where none has told of them for half a minute."""
    supervisor_totals: Mapping[str, int] = field(default_factory=dict)
    """Lifetime counters of the supervisor."""
    policy_quantiles: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Quantiles of the same returns, by module id and by "0.05" and so on."""
    env: str = ""
    """`sampling.env`, and `version` of Headrace, at the broker; "" where it does not tell."""
    version: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Values by dotted key, of `redis_keys.TOLD_SETTINGS`; empty where the broker does not tell them."""
    refused: Sequence[tuple[str, str, int]] = ()
    """(peer, kind, count) of the messages that the broker has refused most since it started."""
    joins_blocked: str = ""
    """The reason for which no peer can join now, as the broker reports it while it lives; "" where peers can."""
    started_unix_s: float | None = None
    """Unix time (s) of the start of the broker that reports; None if it does not say."""
    reported_unix_s: float | None = None
    """Unix time (s) of the broker's last report, by the broker's clock; None before the first."""
    ended_unix_s: float | None = None
    """The same of the last report of a broker that stopped in order; None while one runs, and where it died."""
    garbage: tuple[str, ...] = ()
    away: RedisAway | None = None
    """Since when Redis has been away, or has refused the broker, where these are the numbers in report.json."""

    @property
    def failures(self) -> list[EnvErrorRow]:
        """Return the groups of failures of envs, without those of infos."""
        return [row for row in self.errors.values() if row.kind != INFO_LEFT_OUT]

    @property
    def is_live(self) -> bool:
        """Return whether a broker reports. Gauges expire some reports after the last one, whatever the interval."""
        return bool(self.gauges) and self.ended_unix_s is None

    @property
    def report_interval_s(self) -> float:
        """Return the time between two reports; 0 where the broker does not tell it."""
        return float(self.settings.get("broker.report_interval_s", 0.0))

    def is_folded(self, life: SourceKey) -> bool:
        """Return whether this life has ended and its row was added to the folded lives of its slot."""
        return life[0] in self.folded and life[1] in self.folded[life[0]]


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


@dataclass(frozen=True, slots=True)
class EventView:
    """An event of the fleet, such as a worker that joined. `identity` is its id in the stream."""

    identity: str
    unix_s: float
    kind: str
    fields: Mapping[str, str]


class FleetView(Closable):
    """Reads one fleet's numbers. It may be kept and read again; one thread at a time.

    With `run_dir`, it takes them from the file that the broker keeps there while Redis is away, if that is newer.
    """

    def __init__(self, url: str, fleet_id: str, run_dir: Path | None = None) -> None:
        self._url = without_password(url)
        self._fleet_id = fleet_id
        self._run_dir = run_dir
        self._reader = RedisReader(connect(url, READ_TIMEOUT_S))
        self._told: ToldByBroker | None = None
        """What the broker told at the last read, if that was newer than Redis."""

    def read(self, of: Collection[keys.Key] = _READ) -> Snapshot:
        """Read the fleet as it is now, or what it has in some of the keys. Waits some seconds at most.

        Raises `RedisUnavailableError` if neither Redis nor the broker tells it, or `RedisContractError` of its kind.
        """
        raw: dict[str, Hash] = {key.name: {} for key in _READ}
        self._told = read_report_file(self._run_dir, self._fleet_id) if self._run_dir is not None else None
        try:
            with naming_failures(self._url, READ_TIMEOUT_S):
                raw |= self._reader.hashes_at_once({key.name: keys.key_name(self._fleet_id, key) for key in of})
        except RedisUnavailableError:
            if self._told is None:
                raise
        values = HashParser()
        if self._told is not None:
            if (values.moment("fleet", raw["fleet"].get(b"reported_unix_s")) or 0.0) < self._told.reported_unix_s:
                raw |= _hashes(self._told)
            else:
                self._told = None  # of a broker that died meanwhile
        if seen := keys.other_contract(raw["fleet"].get(b"contract_version")):
            raise RedisContractError(self._url, self._fleet_id, seen, keys.CONTRACT_VERSION)
        rows, folded = values.rows(raw["ledger"]), values.folded(raw["folded"])
        lease = values.lease(raw["lease"])
        groups = values.groups(*(raw[key.name] for key in keys.OF_GROUPS))
        if not raw["gauges"]:
            lease.pop("connected", None)
            groups = {name: books.unreported() for name, books in groups.items()}
        return Snapshot(
            fleet_id=self._fleet_id,
            rows=rows,
            folded=folded,
            fleet=add_up(rows | {(slot, 0): lives.row for slot, lives in folded.items()}),
            gauges=values.gauges(raw["gauges"]),
            totals=values.totals(raw["totals"]),
            sources=values.sources(raw["sources"]),
            workers=values.workers(raw["workers"]),
            lease=lease,
            groups=groups,
            incarnations=values.incarnations(raw["incarnations"]),
            metrics=values.metrics(raw["metrics"]),
            errors=values.env_errors(raw["errors"]),
            policies=values.policies(raw["policies"]),
            task_figures=values.task_figures(raw["task_figures"]),
            processes=values.processes(raw["processes"]),
            supervisor_totals=values.totals(raw["supervisor_totals"]),
            policy_quantiles=values.policy_quantiles(raw["policies"]),
            env=_text(raw["fleet"].get(b"env")),
            version=_text(raw["fleet"].get(b"version")),
            settings=values.settings(raw["fleet"].get(b"settings")),
            refused=values.refused(raw["fleet"].get(b"refused")),
            joins_blocked=_text(raw["fleet"].get(b"joins_blocked")) if raw["gauges"] else "",
            started_unix_s=values.moment("fleet", raw["fleet"].get(b"started_unix_s")),
            reported_unix_s=values.moment("fleet", raw["fleet"].get(b"reported_unix_s")),
            ended_unix_s=values.moment("fleet", raw["fleet"].get(b"ended_unix_s")),
            garbage=tuple(values.garbage),
            away=self._told.away if self._told is not None else None,
        )

    def learner_rows(self, after: tuple[int, int] = (0, 0)) -> list[LearnerRowView]:
        """Return the rows of learners after (epoch, number), the oldest first, 500 at most.

        A row that cannot be read has no values. Waits some seconds at most. Raises `RedisUnavailableError`. While Redis
        is away, these are the rows that it lacks.
        """
        if self._told is not None:
            return [row for row in _rows_of(self._told) if row.identity > after]
        entries = self._entries(keys.LEARNER_ROWS, "{}-{}".format(*after), MOST_ROWS_AT_ONCE)
        return [_learner_row(*entry) for entry in entries]

    def _entries(self, key: keys.Key, after: str, most: int) -> list[tuple[bytes, dict[bytes, bytes]]]:
        with naming_failures(self._url, READ_TIMEOUT_S):
            return self._reader.entries(keys.key_name(self._fleet_id, key), after, most)

    def newest_learner_row(self) -> LearnerRowView | None:
        """Return the newest row of learners; None without one. Waits and raises like `learner_rows`."""
        if self._told is not None:
            return next(reversed(_rows_of(self._told)), None)
        key = keys.key_name(self._fleet_id, keys.LEARNER_ROWS)
        with naming_failures(self._url, READ_TIMEOUT_S):
            entry = self._reader.newest_entry(key)
        return None if entry is None else _learner_row(*entry)

    def history(self, interval_s: int, after_unix_s: float = 0.0) -> list[tuple[float, dict[str, float]]]:
        """Return (unix s, gauges and totals by name) of each entry after a time, the oldest first.

        `interval_s` is one of those in `redis_keys.RINGS`. A value that is no finite number is left out. Waits some
        seconds at most. Raises `RedisUnavailableError`.
        """
        key, _, most = next(ring for ring in keys.RINGS if ring[1] == interval_s)
        entries = self._entries(key, f"{max(0, round(1000 * after_unix_s))}-0", most)
        return [(int(identity.split(b"-")[0]) / 1000, HashParser().gauges(fields)) for identity, fields in entries]

    def events(self, after: str = "0-0") -> list[EventView]:
        """Return the events after the one of this identity, the oldest first, 1,000 at most.

        Waits some seconds at most. Raises `RedisUnavailableError`.
        """
        return [_event(*entry) for entry in self._entries(keys.EVENTS, after, MOST_EVENTS)]

    def server_info(self) -> dict[str, Any] | None:
        """Return the fields of the server's INFO by name; None if this Redis user may not call INFO.

        Waits some seconds at most. Raises `RedisUnavailableError`.
        """
        with naming_failures(self._url, READ_TIMEOUT_S), suppress(NoPermissionError):
            found: Any = self._reader.client.info()
            return dict(found)
        return None

    def refusal(self) -> str:
        """Return why the server takes no writes; "" if it takes them, or does not tell. Waits and raises as above."""
        info = self.server_info() or {}
        if info.get("role") == "slave" and info.get("slave_read_only"):
            return "it is a read-only replica"
        full = info.get("maxmemory_policy") == "noeviction" and 0 < info.get("maxmemory", 0) <= info["used_memory"]
        return "its memory is full: maxmemory" if full else ""

    def close(self) -> None:
        """Close the connection."""
        self._reader.client.close()


def crowded_learner(seen: Snapshot) -> tuple[str, str] | None:
    """Return, in words, that a connected learner's torch takes the cores of workers on its host, and the remedy."""
    lease = seen.lease
    if not lease.get("connected") or not lease.get("host"):
        return None
    here = sum(1 for row in seen.workers.values() if row.get("host") == lease["host"])
    return crowded_cores(int(lease.get("torch_threads", 0)), int(lease.get("cores", 0)), here)


def told_versions(seen: Snapshot) -> dict[str, str]:
    """Return the version of Headrace of the broker, the learner and each worker by name; "" if a peer does not tell it.

    The env hosts of a worker have one entry, with all of their versions. Only connected peers are listed. The texts are
    safe to print on a terminal.
    """
    told: dict[str, Any] = {}
    if seen.version:
        told["broker"] = seen.version
    if seen.lease.get("connected"):
        told["learner"] = seen.lease.get("headrace_version", "")
    for slot, state in sorted(seen.workers.items()):
        told[f"worker-{slot}"] = state.get("headrace_version", "")
        if versions := state.get("env_hosts", {}).get("versions", []):
            told[f"env hosts of worker-{slot}"] = ", ".join(versions) if all(versions) else ""
    return {name: one_line(str(version))[:MOST_VERSION] for name, version in told.items()}


def _hashes(told: ToldByBroker) -> dict[str, Hash]:
    """Return the hashes that the broker told, as Redis would have them now."""
    gone = _WHILE_LIVE if time.time() > told.expires_unix_s else ()
    return {
        key: {} if key in gone else {name.encode(): value.encode() for name, value in fields.items()}
        for key, fields in told.hashes.items()
    }


def _rows_of(told: ToldByBroker) -> list[LearnerRowView]:
    return [
        _learner_row(identity.encode(), {name.encode(): value.encode() for name, value in fields.items()})
        for identity, fields in told.rows
    ]


def _text(value: bytes | None) -> str:
    return (value or b"").decode(errors="replace")[:_LONGEST_TEXT]


def _event(identity: bytes, fields: Mapping[bytes, bytes]) -> EventView:
    text = {_text(name): _text(value) for name, value in fields.items()}
    at = int(identity.split(b"-")[0]) / 1000  # Redis guarantees this form
    return EventView(identity.decode(), at, text.get("event", ""), text)


def _learner_row(identity: bytes, fields: Mapping[bytes, bytes]) -> LearnerRowView:
    epoch, number = map(int, identity.split(b"-"))  # Redis guarantees this form
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
