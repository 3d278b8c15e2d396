"""The broker's reports to Redis: one thread, a mailbox with room for the newest report, and nobody who waits for it.

    broker loop  ── offer(report) ──▶ [newest report]  ─┐
                 ── offer_weights ──▶ [newest weights] ─┼─▶ reporter thread ── one script call ──▶ Redis
                 ◀── take_saved ───── [what stood there]┘      250 ms a call, no retries by the client

A report is the full cumulative state, so a lost one costs nothing: the next says it all. That is also how Redis is made
good after it came back without its newest writes. Sampling and delivery never depend on any of this.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
import redis

from headrace.broker.redis_client import REDIS_FAILURES, Reader, connect, in_words
from headrace.broker.redis_scripts import MERGE
from headrace.broker.redis_values import Source, Values
from headrace.broker.redis_weights import LARGEST_BYTES, StoredWeights, Version, WeightsShelf
from headrace.schemas import redis_keys as keys
from headrace.schemas.ledger import LedgerRow
from headrace.schemas.runner_counters import Counters
from headrace.schemas.wire import Buffer

log = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.05
LONGEST_BACKOFF_S = 1.0
WEIGHTS_INTERVAL_S = 1.0
MOST_EVENTS = 1000

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
)


@dataclass(frozen=True, slots=True)
class Report:
    """The broker's full state for Redis; do not change what it holds once it is offered.

    `rows` are all ledger rows, also those of dead incarnations; their counters (`redis_keys.row_counters`) are
    reported with them. `counters` are further cumulative counters by (slot, incarnation), such as bytes_total; one
    that the row tells as well is taken from the row.
    `workers` and `runner_state`, by slot, and `lease` go to Redis as JSON and text. `events` are news since the last
    report, each a flat dict.
    """

    rows: list[LedgerRow] = field(default_factory=list)
    counters: Mapping[Source, Mapping[str, int]] = field(default_factory=dict)
    gauges: Mapping[str, float] = field(default_factory=dict)
    workers: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    lease: Mapping[str, Any] = field(default_factory=dict)
    incarnations: Mapping[int, int] = field(default_factory=dict)
    runner_state: Mapping[int, Counters] = field(default_factory=dict)
    events: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True)
class Saved:
    """What stood in Redis when the reporter first reached it. Checked for form; the frames are not decoded yet."""

    rows: dict[Source, LedgerRow]
    counters: dict[Source, dict[str, int]]
    incarnations: dict[int, int]
    runner_state: dict[int, Counters]
    lease_epoch: int
    weights: StoredWeights | None


class RedisReporter:
    """Reports to the Redis at `url`. Every method but `close` returns at once, whatever Redis does, from any thread.

    While Redis is away or refuses writes, attempts are counted in `failures` and repeated after at most a second; the
    outage is logged once. Raises `RedisUnavailableError` for a URL that cannot be understood, and nothing afterwards.
    """

    def __init__(self, url: str, fleet_id: str) -> None:
        self._url = keys.without_password(url)
        self._client = connect(url)
        self._fleet_id = fleet_id
        self._merge = _MergeScript(self._client, fleet_id)
        self._shelf = WeightsShelf(self._client, fleet_id)
        self._news = threading.Condition()
        # All of the following is shared, and read or written under `_news` only.
        self._report: Report | None = None
        self._weights: StoredWeights | None = None
        self._events: deque[tuple[int, list[str]]] = deque(maxlen=MOST_EVENTS)
        self._event_number = 0
        self._saved: Saved | None = None
        self._saved_read = False
        self._failures = 0
        self._away_since: float | None = None
        self._backoff_s = FIRST_BACKOFF_S
        self._not_before = 0.0
        self._weights_not_before = 0.0
        self._closing_at = math.inf
        self._thread = threading.Thread(target=self._run, name="redis-reporter", daemon=True)
        self._thread.start()

    @property
    def failures(self) -> int:
        """Attempts to reach Redis that failed so far."""
        with self._news:
            return self._failures

    @property
    def available(self) -> bool:
        """Whether the last attempt succeeded, and there was one."""
        with self._news:
            return self._saved_read and self._away_since is None

    def offer(self, report: Report) -> None:
        """Hand over the newest state. Never waits; a report that was not sent yet is replaced, its events are kept."""
        with self._news:
            for event in report.events:
                if fields := [str(part) for item in event.items() for part in item]:
                    self._event_number += 1
                    self._events.append((self._event_number, fields))
            self._report = report
            self._news.notify_all()

    def offer_weights(self, version: Version, frames: Sequence[Buffer]) -> None:
        """Hand over the newest WEIGHTS message, to be found by a broker that starts later. Never waits.

        At most one version a second is written, the newest. More than 64 MiB are skipped with one line in the log.
        Frames that are not bytes are copied.
        """
        size = sum(memoryview(frame).nbytes for frame in frames)
        if size > LARGEST_BYTES:
            log.warning("weights %s are not kept in Redis: %d bytes, at most %d are", version, size, LARGEST_BYTES)
            return
        with self._news:
            if self._weights is None or version > self._weights.version:
                self._weights = StoredWeights(version, [_as_bytes(frame) for frame in frames])
                self._news.notify_all()

    def take_saved(self, wait_s: float = 0.0) -> Saved | None:
        """What stood in Redis, once, after it was first reached; None before and afterwards. Waits `wait_s` for it."""
        with self._news:
            self._news.wait_for(lambda: self._saved_read, wait_s)
            saved, self._saved = self._saved, None
            return saved

    def close(self, deadline_s: float = 1.0) -> bool:
        """Send what is still in the mailbox, if Redis takes it within `deadline_s`, and end the thread.

        Returns whether all was sent. Waits at most for the deadline and the one call that is under way then.
        """
        with self._news:
            self._closing_at = min(self._closing_at, time.monotonic() + deadline_s)
            self._news.notify_all()
        self._thread.join(deadline_s + 2.0)
        with self._news:
            return self._report is None and self._weights is None

    # From here on: the reporter thread.

    def _run(self) -> None:
        while self._wait_for_work():
            try:
                self._visit()
            except REDIS_FAILURES as error:
                self._note_absence(error)
            else:
                self._note_presence()
        self._client.close()

    def _wait_for_work(self) -> bool:
        """Wait until there is something to do and the backoff is over; False when it is time to end."""
        with self._news:
            while True:
                now = time.monotonic()
                due = self._next_due()
                if now >= self._closing_at or (math.isinf(due) and not math.isinf(self._closing_at)):
                    return False
                if due <= now:
                    return True
                until = min(due, self._closing_at)
                self._news.wait(None if math.isinf(until) else until - now)

    def _next_due(self) -> float:
        closing = not math.isinf(self._closing_at)
        due = math.inf
        if self._report is not None or not (self._saved_read or closing):
            due = self._not_before
        if self._weights is not None:
            due = min(due, self._not_before if closing else max(self._not_before, self._weights_not_before))
        return due

    def _visit(self) -> None:
        """Do what is due. What stands in Redis is read before the first write, so that nothing of it is lost."""
        with self._news:
            saved_read, report, events = self._saved_read, self._report, list(self._events)
            closing, now = not math.isinf(self._closing_at), time.monotonic()
            weights = self._weights if closing or now >= self._weights_not_before else None
            failures = self._failures
        if not saved_read:
            saved = read_saved(self._client, self._fleet_id)
            with self._news:
                self._saved, self._saved_read = saved, True
                self._news.notify_all()
        if report is not None:
            self._merge(report, events, failures)
            self._forget_sent(report, events)
        if weights is not None:
            self._store(weights)

    def _forget_sent(self, report: Report, events: list[tuple[int, list[str]]]) -> None:
        with self._news:
            if self._report is report:
                self._report = None
            while events and self._events and self._events[0][0] <= events[-1][0]:
                self._events.popleft()

    def _store(self, weights: StoredWeights) -> None:
        answer = self._shelf.store(weights.version, weights.frames)
        with self._news:
            self._weights_not_before = time.monotonic() + WEIGHTS_INTERVAL_S
            if self._weights is weights and answer in ("flipped", "older"):
                self._weights = None

    def _note_absence(self, error: BaseException) -> None:
        with self._news:
            self._failures += 1
            first = self._away_since is None
            now = time.monotonic()
            self._away_since = now if self._away_since is None else self._away_since
            self._not_before = now + self._backoff_s
            self._backoff_s = min(2 * self._backoff_s, LONGEST_BACKOFF_S)
        if first:
            log.warning("Redis at %s is away (%s); the fleet goes on and reports later", self._url, in_words(error))

    def _note_presence(self) -> None:
        with self._news:
            away_since, self._away_since = self._away_since, None
            self._backoff_s, self._not_before = FIRST_BACKOFF_S, 0.0
            failures = self._failures
        if away_since is not None:
            away_s = time.monotonic() - away_since
            log.info("Redis at %s is back after %.1f s (%d failures so far)", self._url, away_s, failures)


class _MergeScript:
    """Sends a report by the MERGE script; the same report may be sent any number of times."""

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
    """The parts of a report as the MERGE script reads them: integers to compare, everything else as text to store."""
    rows = {keys.source_name(row.slot, row.incarnation): row for row in report.rows}
    from_rows = {source: keys.row_counters(row) for source, row in rows.items()}
    further: dict[str, dict[str, int]] = {}
    for (slot, incarnation), counters in report.counters.items():
        source = keys.source_name(slot, incarnation)
        said_by_row = from_rows.get(source, {})
        further[source] = {name: value for name, value in counters.items() if name not in said_by_row}
    return {
        "rows": {source: row.model_dump_json() for source, row in rows.items()},
        "row_counters": from_rows,
        "counters": further,
        "gauges": {name: repr(float(value)) for name, value in report.gauges.items() if math.isfinite(value)},
        "workers": {str(slot): orjson.dumps(state).decode() for slot, state in report.workers.items()},
        "lease": {name: str(value) for name, value in report.lease.items()},
        "incarnations": {str(slot): incarnation for slot, incarnation in report.incarnations.items()},
        "runner_state": {str(slot): orjson.dumps(counters).decode() for slot, counters in report.runner_state.items()},
    }


def read_saved(client: redis.Redis, fleet_id: str) -> Saved:
    """What stands in Redis for this fleet; what cannot be read is logged and left out. May raise `REDIS_FAILURES`."""
    wanted = (keys.LEDGER, keys.SOURCES, keys.INCARNATIONS, keys.LEASE, keys.RUNNER_STATE)
    raw, wrong = Reader(client).hashes_at_once({key.name: keys.key_name(fleet_id, key) for key in wanted})
    values = Values(garbage=wrong)
    saved = Saved(
        rows=values.rows(raw["ledger"]),
        counters=values.sources(raw["sources"]),
        incarnations=values.incarnations(raw["incarnations"]),
        runner_state=values.runner_state(raw["runner_state"]),
        lease_epoch=values.lease(raw["lease"]).get("epoch", 0),
        weights=WeightsShelf(client, fleet_id).load(),
    )
    for sentence in values.garbage:
        log.error("left out what stands in Redis: %s", sentence)
    return saved


def _as_bytes(frame: Buffer) -> bytes:
    return frame if isinstance(frame, bytes) else bytes(frame)
