"""The broker's reports to Redis: one thread, and a mailbox for the newest report, so that no caller waits.

    broker loop  ── offer(report) ──▶ [what changed]   ─┐
                 ── offer_weights ──▶ [newest weights] ─┼─▶ reporter thread ── one script call ──▶ Redis
                 ── offer_rows ─────▶ [learners' rows] ─┤
                 ◀── take_saved ───── [what stood there]┘      250 ms a call, no retries by the client

A report says what changed. The thread keeps the full cumulative state, and sends what this Redis has not confirmed, in
parts. After a failure, and where Redis has lost or got something meanwhile, it sends everything. All values are
cumulative, so a repeated part adds nothing. Sampling and delivery never depend on any of this. While Redis is away the
same state stands in the run directory (`report_file.py`).
"""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from redis.exceptions import RedisError

from headrace.broker.files.books_file import BooksFile
from headrace.broker.files.lifetime_file import LifetimeFile
from headrace.broker.files.report_file import RedisAway, ReportFile
from headrace.broker.redis.blob import LARGEST_WEIGHTS, ByteBudget, StoredBlob, weights_in
from headrace.broker.redis.client import ODD_ANSWERS, REDIS_FAILURES, RedisReader, connect, in_words
from headrace.broker.redis.parser import SourceKey
from headrace.broker.redis.rows import ReceivedRow, append_rows
from headrace.broker.reports.mirror import Mirror
from headrace.broker.reports.report import LIVE_S, MergeScript, Part, Report, SavedState, read_saved_state
from headrace.schemas.accounts import redis_keys as keys
from headrace.schemas.accounts.ledger import LedgerRow
from headrace.schemas.basics.bounds import TRAIN, Version
from headrace.schemas.frames.wire import Buffer
from headrace.schemas.settings.config import REDIS_BYTES_PER_HOUR
from headrace.schemas.settings.redis_url import without_password

log = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.05
LONGEST_BACKOFF_S = 1.0
WEIGHTS_INTERVAL_S = 1.0
MOST_EVENTS = 1000
_MOST_OTHERS = 3
"""Times in one visit that Redis may hold another part than the last one that was sent."""
MOST_ROWS = 1000
"""Most rows of the learner that may wait for Redis. Beyond it the oldest are dropped, unless the learner sends them
again.
"""


class RedisReporter:
    """Reports to the Redis at `url`. Any thread may call it; every method but `close` returns at once.

    While Redis is away or refuses writes, the reporter counts attempts in `failures` and repeats them after at most a
    second. It logs the outage once. `weights_per_hour` bounds the bytes of weights that it writes in an hour. `about`:
    further fields of the key `fleet`. Raises `RedisUnavailableError` for a URL that cannot be understood, and nothing
    afterwards.
    """

    def __init__(
        self,
        url: str,
        fleet_id: str,
        books_file: BooksFile | None = None,
        live_s: float = LIVE_S,
        weights_per_hour: int = REDIS_BYTES_PER_HOUR // 2,
        about: Mapping[str, str] | None = None,
        lifetime_file: LifetimeFile | None = None,
        report_file: ReportFile | None = None,
    ) -> None:
        self._url = without_password(url)
        self._client = connect(url)
        self._fleet_id = fleet_id
        self._merge = MergeScript(self._client, fleet_id, live_s, about=about)
        self._mirror = Mirror()
        self._books_file = books_file
        self._lifetime_file = lifetime_file
        self._report_file = report_file
        self._file_failed = self._lifetime_failed = self._report_failed = False
        self._taken_unix_s: float | None = None
        """When the newest report came that is in the mirror; None before the first."""
        self._away_reason = ""
        self._shelf = weights_in(self._client, fleet_id)
        self._budget = ByteBudget(weights_per_hour)
        self._news = threading.Condition()
        # All of the following is shared, and read or written under `_news` only.
        self._offered: list[Report] = []
        self._is_behind = False
        """True while Redis lacks something that was offered."""
        self._closed_rows: defaultdict[str, list[LedgerRow]] = defaultdict(list)
        self._weights: StoredBlob | None = None
        self._told_too_large = False
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
        self._weights_not_before = self._budget.due
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
        """Hand over what changed. Never waits."""
        with self._news:
            for event in report.events:
                if fields := [str(part) for item in event.items() for part in item]:
                    self._event_number += 1
                    self._events.append((self._event_number, fields))
            self._offered.append(report)
            self._news.notify_all()

    def take_closed_rows(self, group: str = TRAIN) -> list[LedgerRow]:
        """Return the rows of ended lives that Redis has since the last call, of one consumer group."""
        with self._news:
            return self._closed_rows.pop(group, [])

    @property
    def is_idle(self) -> bool:
        """Return whether Redis has everything that was offered so far, except weights and rows of learners."""
        with self._news:
            return not self._offered and not self._is_behind

    def offer_weights(self, version: Version, frames: Sequence[Buffer]) -> None:
        """Hand over the newest WEIGHTS message for a broker that starts later. Never waits.

        The reporter writes at most one version a second, the newest, and large ones less often, as its budget says. It
        skips a version of more than 64 MiB, and logs that once. The frames are not copied: they must not change.
        """
        if math.isinf(self._budget.due):
            return
        size = sum(memoryview(frame).nbytes for frame in frames)
        if size > LARGEST_WEIGHTS:
            if not self._told_too_large:
                log.warning(
                    "weights are not kept in Redis: version %s has %d bytes, and the limit is %d; a broker that starts "
                    "again gets them from the learner",
                    version,
                    size,
                    LARGEST_WEIGHTS,
                )
            self._told_too_large = True
            return
        with self._news:
            if self._weights is None or version > self._weights.version:
                self._weights = StoredBlob(version, list(frames))
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
        """Return the state that Redis held when it was first reached. Waits up to `wait_s` for it.

        Return None before that, and after the first call that returned the state.
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
            return not self._offered and not self._is_behind and self._weights is None and not self._rows

    # From here on: the reporter thread.

    def _run(self) -> None:
        while self._wait_for_work():
            self._take_offered()
            if time.monotonic() >= self._not_before:
                try:
                    self._visit()
                except REDIS_FAILURES as error:
                    self._note_absence(error)
                else:
                    self._note_presence()
            self._write_report()
        self._write_report(last=True)
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
        if self._offered:
            due = 0.0  # files get it at once, also between two attempts to reach Redis
        elif self._is_behind or self._rows or not (self._saved_read or closing):
            due = self._not_before
        if self._weights is not None:
            due = min(due, self._not_before if closing else max(self._not_before, self._weights_not_before))
        return due

    def _take_offered(self) -> None:
        """Take the reports of the mailbox into the mirror, and what the loss of Redis must not cost into files."""
        with self._news:
            offered, self._offered = self._offered, []
            self._is_behind = self._is_behind or bool(offered)
            closing = not math.isinf(self._closing_at)
        for report in offered:
            self._taken_unix_s = round(time.time(), 3)  # as Redis has it: a file of the same report is not newer
            self._mirror.take(report)
        self._write_ended()
        self._write_lifetime(last=closing)

    def _visit(self) -> None:
        """Send everything that is due.

        Read the state in Redis before the first write, so that no part of it is lost.
        """
        with self._news:
            saved_read, events = self._saved_read, list(self._events)
            closing, now = not math.isinf(self._closing_at), time.monotonic()
            weights = self._weights if closing or now >= self._weights_not_before else None
            failures, rows = self._failures, list(self._rows)
        if not saved_read:
            saved = read_saved_state(self._client, self._fleet_id)
            if math.isinf(self._budget.due):
                saved = replace(saved, weights=None)
            self._mirror.know_counters(name for counters in saved.counters.values() for name in counters)
            with self._news:
                self._saved, self._saved_read = saved, True
                self._news.notify_all()
        if self._is_behind:
            self._send_report(events, failures)
        if rows:
            self._append(rows)
        if weights is not None:
            self._store(weights)

    def _append(self, rows: Sequence[ReceivedRow]) -> None:
        append_rows(self._client, self._fleet_id, rows)
        with self._news:
            self._rows_stored = rows[-1].version
            while self._rows and self._rows[0].version <= self._rows_stored:
                self._rows.popleft()

    def _send_report(self, events: list[tuple[int, list[str]]], failures: int) -> None:
        """Send part by part what Redis lacks."""
        if self._mirror.is_whole:
            self._find_folded_rows()
        others = 0
        while (part := self._mirror.next_part()) is not None:
            sent = events if part.is_first else []
            newer = self._merge(part, sent, failures, after_last=not (self._mirror.is_whole and part.is_first))
            if newer is None:
                others += 1
                if others > _MOST_OTHERS:
                    raise RedisError("another broker reports to the keys of this fleet")
                log.info("Redis at %s has lost or got something meanwhile; all is reported to it again", self._url)
                self._mirror.forget_confirmed()
                self._find_folded_rows()
                continue
            self._mirror.confirm(part)
            self._note_sent(part, sent, newer)
        self._mirror.is_whole = False
        with self._news:
            self._is_behind = False

    def _write_ended(self) -> None:
        """Write the books of ended lives to the file, before Redis gets them, and also while it is away."""
        if not self._mirror.has_new_ends:
            return
        ended = self._mirror.ended()
        try:
            if self._books_file is not None:
                self._books_file.write(ended)
        except OSError as error:
            if not self._file_failed:
                log.error("books.json cannot be written (%s): recorders of ended lives stay, and Redis waits", error)
            self._file_failed = True
        else:
            self._file_failed = False
            self._mirror.ends_written()
            if self._lifetime_file is not None:
                self._lifetime_file.add_ended(ended)

    def _write_lifetime(self, *, last: bool) -> None:
        """Write what Redis would lose with it to the file, also while Redis is away."""
        lifetime = self._mirror.lifetime()
        if self._lifetime_file is None or lifetime is None:
            return
        try:
            written = self._lifetime_file.write(*lifetime, last=last)
        except OSError as error:
            if not self._lifetime_failed:
                log.warning("lifetime.json cannot be written (%s): the audit lacks lives that end meanwhile", error)
            self._lifetime_failed = True
        else:
            self._lifetime_failed = self._lifetime_failed and not written

    def _write_report(self, *, last: bool = False) -> None:
        """Write what Redis should hold to the file while Redis is away, and remove the file when it is back.

        The last report does not wait for the file's pause.
        """
        if self._report_file is None:
            return
        with self._news:
            away_since, rows = self._away_since, list(self._rows)
        try:
            away = self._report_file.asked()
            if away_since is not None:
                away = RedisAway(time.time() - (time.monotonic() - away_since), self._away_reason)
            if away is None:
                self._report_file.remove()
            elif self._taken_unix_s is not None and (last or self._report_file.is_due):
                hashes = self._merge.hashes_of(self._mirror.whole(), self._taken_unix_s)
                self._report_file.write(away, self._taken_unix_s, hashes, rows)
        except OSError as error:
            if not self._report_failed:
                log.warning("report.json cannot be written (%s): the fleet's numbers stand still meanwhile", error)
            self._report_failed = True
        else:
            self._report_failed = False

    def _find_folded_rows(self) -> None:
        """Find rows in Redis whose lives are folded, and counters there: it may have lost the newest writes."""
        ledger, sources = (keys.key_name(self._fleet_id, key) for key in (keys.LEDGER, keys.SOURCES))
        self._mirror.remove_folded(_lives(RedisReader(self._client).fields(ledger))[TRAIN])
        in_groups = _lives(RedisReader(self._client).fields(keys.key_name(self._fleet_id, keys.GROUP_LEDGER)))
        for name, lives in in_groups.items():
            if (own := self._mirror.of_group(name)) is not None:
                own.remove_folded(lives)
        if self._mirror.lacks_folded:
            names = (name.split(b"/", 2)[2:] for name in RedisReader(self._client).fields(sources))
            self._mirror.know_counters({last[0].decode(errors="replace") for last in names if last})

    def _note_sent(self, part: Part, events: list[tuple[int, list[str]]], newer: set[str]) -> None:
        rows = {keys.source_name(row.slot, row.incarnation): (TRAIN, row) for row in part.report.rows}
        for group, books in (part.report.groups or {}).items():
            rows |= {f"{group}/{keys.source_name(*life)}": (group, row) for life, row in books.rows.items()}
        with self._news:
            for name, (group, row) in rows.items():
                if row.closed and name not in newer:
                    self._closed_rows[group].append(row)
            while events and self._events and self._events[0][0] <= events[-1][0]:
                self._events.popleft()

    def _store(self, weights: StoredBlob) -> None:
        answer = self._shelf.store(
            weights.version, weights.frames, spend=lambda nbytes: self._budget.spend(nbytes, time.monotonic())
        )
        with self._news:
            self._weights_not_before = max(time.monotonic() + WEIGHTS_INTERVAL_S, self._budget.due)
            if self._weights is weights and answer in ("flipped", "older"):
                self._weights = None

    def _note_absence(self, error: BaseException) -> None:
        with self._news:
            self._failures += 1
            self._away_reason = in_words(error)
            first = self._away_since is None
            now = time.monotonic()
            self._away_since = now if self._away_since is None else self._away_since
            self._not_before = now + self._backoff_s
            self._backoff_s = min(2 * self._backoff_s, LONGEST_BACKOFF_S)
        if first:
            log.warning(
                "Redis at %s is away (%s); the fleet goes on and reports later",
                self._url,
                in_words(error),
                exc_info=error if isinstance(error, ODD_ANSWERS) else None,
            )

    def _note_presence(self) -> None:
        with self._news:
            away_since, self._away_since = self._away_since, None
            self._backoff_s, self._not_before = FIRST_BACKOFF_S, 0.0
            failures = self._failures
        if away_since is not None:
            away_s = time.monotonic() - away_since
            log.info("Redis at %s is back after %.1f s (%d failures so far)", self._url, away_s, failures)


def _lives(fields: Iterable[bytes]) -> defaultdict[str, list[SourceKey]]:
    """Return the lives of these fields of `ledger` or `group_ledger`, by consumer group."""
    lives: defaultdict[str, list[SourceKey]] = defaultdict(list)
    for name in fields:
        if found := re.fullmatch(rb"(?:(\w[\w-]*)/)?(\d{1,9})/(\d{1,9})", name):
            lives[(found[1] or TRAIN.encode()).decode()].append((int(found[2]), int(found[3])))
    return lives
