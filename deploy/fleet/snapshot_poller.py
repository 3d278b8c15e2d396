"""Poller of the fleet's numbers, in a thread of its own: a Redis that hangs must not delay a restart."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from headrace.deploy.monitoring.facts import Entry, RecentHistory
from headrace.deploy.run.redis_view import FleetView, LearnerRowView, Snapshot
from headrace.schemas.errors import RedisUnavailableError

INTERVAL_S = 0.25

MOST_ROWS = 10_000
"""Rows of the learner that are kept until they are taken."""


class SnapshotPoller:
    """Polls the numbers until closed. `snapshot` is the newest result, `age_s` how long ago Redis had the newest ones.

    `recent` has the numbers of the newest two minutes.

    It also gathers the rows that learners log, for `take_learner_rows`.
    """

    def __init__(self, url: str, fleet_id: str, run_dir: Path) -> None:
        self._view = FleetView(url, fleet_id, run_dir)
        self._history = RecentHistory()
        self.snapshot: Snapshot | None = None
        self.recent: Sequence[Entry] = ()
        self.error = ""
        """The reason for which Redis could not be read, or refuses the broker; "" if all is well."""
        self._learner_rows: deque[LearnerRowView] = deque(maxlen=MOST_ROWS)
        self._newest_row = (0, 0)
        self._read_at = time.monotonic()
        self._closing = threading.Event()
        self.read()  # before the thread starts: the view serves one thread at a time
        self._thread = threading.Thread(target=self._run, name="redis-watch", daemon=True)
        self._thread.start()

    @property
    def age_s(self) -> float:
        """Return the seconds since Redis last answered, or took what the broker reports."""
        away = self.snapshot.away if self.snapshot is not None else None
        return time.monotonic() - self._read_at if away is None else max(0.0, time.time() - away.since_unix_s)

    def read(self) -> bool:
        """Read now. Return False when Redis does not answer within its timeout, or refuses the broker.

        Other threads call it only after `close`.
        """
        try:
            self.snapshot = self._view.read()
            if self.snapshot.away is None:
                self.recent = self._history.read(self._view, self.snapshot.reported_unix_s)
            while rows := self._view.learner_rows(self._newest_row):
                self._newest_row = rows[-1].identity
                self._learner_rows.extend(rows)
        except RedisUnavailableError as failure:
            self.error = failure.reason
            return False
        if self.snapshot.away is not None:
            self.error = self.snapshot.away.reason
            return False
        self.error = ""
        self._read_at = time.monotonic()
        return True

    def take_learner_rows(self) -> list[LearnerRowView]:
        """Return the learners' rows since the last call, in order. The first call returns all that Redis still has."""
        return [self._learner_rows.popleft() for _ in range(len(self._learner_rows))]

    def close(self) -> None:
        """End the thread and the connection, which a later `read` opens again. `snapshot` stays.

        Waits for a read under way, about a second at most.
        """
        self._closing.set()
        self._thread.join(5.0)
        if not self._thread.is_alive():
            self._view.close()

    def _run(self) -> None:
        while not self._closing.wait(INTERVAL_S):
            self.read()
