"""A thread for each logger, so that a slow or failing one holds up neither the supervisor nor another logger."""

from __future__ import annotations

import logging
import threading
from collections import deque

from headrace.deploy.loggers import Logger, Row
from headrace.schemas.basics.stop_event import raise_stop
from headrace.schemas.errors import words_of

log = logging.getLogger("headrace.supervisor")

MOST_WAITING = 1000
"""Most rows that may wait for a slow logger. Beyond it the oldest are dropped."""


class LoggerThread:
    """Calls one logger from a thread of its own. `offer` never waits and never raises."""

    def __init__(self, name: str, logger: Logger) -> None:
        self.name = name
        self._logger = logger
        self._rows: deque[tuple[Row, int]] = deque(maxlen=MOST_WAITING)
        self._news = threading.Condition()
        self._closing = False
        self._failed = False
        self._dropped = 0
        self._thread = threading.Thread(target=self._run, name=f"logger-{name}", daemon=True)
        self._thread.start()

    def offer(self, row: Row, step: int) -> None:
        """Hand over a row."""
        with self._news:
            if self._failed:
                return
            if len(self._rows) == MOST_WAITING:
                self._dropped += 1
                if self._dropped == 1:
                    log.warning("logger %s is too slow: its oldest rows are dropped from now on", self.name)
            self._rows.append((row, step))
            self._news.notify()

    def begin_close(self) -> None:
        """Let the thread log what is left, close the logger and end."""
        with self._news:
            self._closing = True
            self._news.notify()

    def finish_close(self, deadline_s: float) -> None:
        """Wait for the end, `deadline_s` at most. Rows not logged by then are lost; a warning says how many."""
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            log.warning(
                "logger %s did not end within %g s and is abandoned; %d rows were left",
                self.name,
                deadline_s,
                len(self._rows),
            )
        elif self._dropped:
            log.warning("logger %s was too slow: %d rows were dropped", self.name, self._dropped)

    def _run(self) -> None:
        try:
            while (entry := self._next()) is not None:
                self._logger.log(*entry)
            self._logger.close()
        except BaseException as error:  # a user's code, or a package of others
            raise_stop(error)
            with self._news:
                self._failed = True
                self._rows.clear()
            log.error("logger %s failed and is switched off (%s)", self.name, words_of(error), exc_info=error)

    def _next(self) -> tuple[Row, int] | None:
        with self._news:
            self._news.wait_for(lambda: self._rows or self._closing)
            return self._rows.popleft() if self._rows else None
