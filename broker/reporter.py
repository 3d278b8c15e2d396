"""The broker's reports to Redis: one thread, and a mailbox for the newest report, so that no caller waits.

    broker loop  ── offer(report) ──▶ [newest report]  ─┐
                 ── offer_weights ──▶ [newest weights] ─┼─▶ reporter thread ── one script call ──▶ Redis
                 ── offer_rows ─────▶ [learners' rows] ─┤
                 ◀── take_saved ───── [what stood there]┘      250 ms a call, no retries by the client

A report is the full cumulative state, so a lost one costs nothing: the next one says it all. In the same way Redis gets
back newest writes that it lost. Sampling and delivery never depend on any of this.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Sequence

from headrace.broker.redis_client import REDIS_FAILURES, connect, in_words
from headrace.broker.redis_rows import ReceivedRow, RedisRows
from headrace.broker.redis_weights import LARGEST_BYTES, RedisWeights, StoredWeights
from headrace.broker.report import MergeScript, Report
from headrace.broker.saved_state import SavedState, read_saved_state
from headrace.schemas import redis_keys as keys
from headrace.schemas.messages import Version
from headrace.schemas.wire import Buffer

log = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.05
LONGEST_BACKOFF_S = 1.0
WEIGHTS_INTERVAL_S = 1.0
MOST_EVENTS = 1000
MOST_ROWS = 1000
"""Most rows of the learner that may wait for Redis. Beyond it the oldest are dropped, unless the learner sends them
again.
"""


class RedisReporter:
    """Reports to the Redis at `url`. Any thread may call it; every method but `close` returns at once.

    While Redis is away or refuses writes, the reporter counts attempts in `failures` and repeats them after at most a
    second. It logs the outage once. Raises `RedisUnavailableError` for a URL that cannot be understood, and nothing
    afterwards.
    """

    def __init__(self, url: str, fleet_id: str) -> None:
        self._url = keys.without_password(url)
        self._client = connect(url)
        self._fleet_id = fleet_id
        self._merge = MergeScript(self._client, fleet_id)
        self._shelf = RedisWeights(self._client, fleet_id)
        self._row_log = RedisRows(self._client, fleet_id)
        self._news = threading.Condition()
        # All of the following is shared, and read or written under `_news` only.
        self._report: Report | None = None
        self._weights: StoredWeights | None = None
        self._events: deque[tuple[int, list[str]]] = deque(maxlen=MOST_EVENTS)
        self._event_number = 0
        self._rows: deque[ReceivedRow] = deque(maxlen=MOST_ROWS)
        self._rows_stored: Version = (0, 0)
        self._saved: SavedState | None = None
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
        """Return the number of failed attempts to reach Redis so far."""
        with self._news:
            return self._failures

    @property
    def available(self) -> bool:
        """Return whether the last attempt succeeded; False before the first one."""
        with self._news:
            return self._saved_read and self._away_since is None

    def offer(self, report: Report) -> None:
        """Hand over the newest state. Never waits.

        It replaces a report that was not sent yet, whose events are kept.
        """
        with self._news:
            for event in report.events:
                if fields := [str(part) for item in event.items() for part in item]:
                    self._event_number += 1
                    self._events.append((self._event_number, fields))
            self._report = report
            self._news.notify_all()

    def offer_weights(self, version: Version, frames: Sequence[Buffer]) -> None:
        """Hand over the newest WEIGHTS message for a broker that starts later. Never waits.

        The reporter writes at most one version a second, the newest. It skips more than 64 MiB with one line in the
        log. Frames that are not bytes are copied.
        """
        size = sum(memoryview(frame).nbytes for frame in frames)
        if size > LARGEST_BYTES:
            log.warning(
                "weights %s are not kept in Redis: they have %d bytes, and the limit is %d",
                version,
                size,
                LARGEST_BYTES,
            )
            return
        with self._news:
            if self._weights is None or version > self._weights.version:
                self._weights = StoredWeights(version, [_as_bytes(frame) for frame in frames])
                self._news.notify_all()

    def offer_rows(self, rows: Sequence[ReceivedRow]) -> None:
        """Hand over rows of the learner, in order. Never waits. While Redis is away the newest 1,000 are kept."""
        with self._news:
            self._rows.extend(rows)
            self._news.notify_all()

    @property
    def rows_stored(self) -> Version:
        """Return (epoch, number) of the newest row in Redis; (0, 0) before the first."""
        with self._news:
            return self._rows_stored

    def take_saved(self, wait_s: float = 0.0) -> SavedState | None:
        """Return what stood in Redis when it was first reached. Waits `wait_s` for it.

        None before that, and after the first call that returned it.
        """
        with self._news:
            self._news.wait_for(lambda: self._saved_read, wait_s)
            saved, self._saved = self._saved, None
            return saved

    def close(self, deadline_s: float = 1.0) -> bool:
        """Send what is still in the mailbox, if Redis takes it within `deadline_s`, and end the thread.

        Return whether all was sent. Waits at most for the deadline and the one call that is under way then.
        """
        with self._news:
            self._closing_at = min(self._closing_at, time.monotonic() + deadline_s)
            self._news.notify_all()
        self._thread.join(deadline_s + 2.0)
        with self._news:
            return self._report is None and self._weights is None and not self._rows

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
        """Wait until there is something to do and the backoff is over. Return False when it is time to end."""
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
        if self._report is not None or self._rows or not (self._saved_read or closing):
            due = self._not_before
        if self._weights is not None:
            due = min(due, self._not_before if closing else max(self._not_before, self._weights_not_before))
        return due

    def _visit(self) -> None:
        """Do what is due. Reads what stands in Redis before the first write, so that nothing of it is lost."""
        with self._news:
            saved_read, report, events = self._saved_read, self._report, list(self._events)
            closing, now = not math.isinf(self._closing_at), time.monotonic()
            weights = self._weights if closing or now >= self._weights_not_before else None
            failures, rows = self._failures, list(self._rows)
        if not saved_read:
            saved = read_saved_state(self._client, self._fleet_id)
            with self._news:
                self._saved, self._saved_read = saved, True
                self._news.notify_all()
        if report is not None:
            self._merge(report, events, failures)
            self._forget_sent(report, events)
        if rows:
            self._append(rows)
        if weights is not None:
            self._store(weights)

    def _append(self, rows: Sequence[ReceivedRow]) -> None:
        self._row_log.append(rows)
        with self._news:
            self._rows_stored = rows[-1].version
            while self._rows and self._rows[0].version <= self._rows_stored:
                self._rows.popleft()

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


def _as_bytes(frame: Buffer) -> bytes:
    return frame if isinstance(frame, bytes) else bytes(frame)
