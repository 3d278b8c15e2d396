"""The rows that a learner has logged and that are not in Redis yet. No I/O, no clock of its own."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from headrace.schemas.accounts.logged_metrics import MOST_VALUES, NOT_FINITE, is_metric_name
from headrace.schemas.basics.bounds import Version
from headrace.schemas.basics.printable import brief
from headrace.schemas.messages.learner_messages import MOST_ROWS, LearnerRow

log = logging.getLogger("headrace.learner")

MOST_WAITING = 1000
"""Most rows kept while the broker or Redis is away. Beyond it the oldest are dropped."""
GATHER_S = 0.1
"""Least seconds between two messages. Rows that are logged in between go in one message."""


class RowQueue:
    """Rows in order. `due` gives those to be sent now; `stored` forgets those that need not be sent again.

    A broker takes rows in order, and only from a publisher that it has welcomed. So `send_again`, after each welcome,
    makes all rows due that are not stored.
    """

    def __init__(self) -> None:
        self._rows: deque[LearnerRow] = deque(maxlen=MOST_WAITING)
        self._sent = 0
        self._number = 0
        self._not_before = 0.0
        self._not_finite: set[str] = set()
        """Metrics whose newest value is not finite."""
        self._told: set[str] = set()
        """Metrics of which the log has said so."""
        self._dropped = False

    def add(self, metrics: Mapping[str, Any], epoch: int, weights_seq: int, unix_s: float) -> None:
        """Add one row. A value that is not finite is left out, with one line in the log for each name.

        In its place each row has "not_finite/NAME" as 1 until the metric is finite again.

        Raises `ValueError` for a bad name, a value that is no number, or too many values.
        """
        values = {name: _number(name, value) for name, value in metrics.items()}
        if len(values) > MOST_VALUES:
            raise ValueError(f"{len(values)} metrics were logged at once; {MOST_VALUES} are allowed")
        self._not_finite -= {name for name, value in values.items() if math.isfinite(value)}
        for name in [name for name, value in values.items() if not math.isfinite(value)]:
            self._leave_out(name, values.pop(name))
        marks = {f"{NOT_FINITE}{name}"[:100]: 1.0 for name in sorted(self._not_finite)}
        values.update(list(marks.items())[: MOST_VALUES - len(values)])
        if not values:
            return
        if len(self._rows) == MOST_WAITING and not self._dropped:
            self._dropped = True
            log.warning("more than %d logged rows wait for the broker or Redis; the oldest are dropped", MOST_WAITING)
        self._number = max(self._number + 1, int(unix_s * 1e6))
        self._rows.append(LearnerRow(epoch=epoch, number=self._number, weights_seq=weights_seq, values=values))

    def due(self, now: float, *, at_once: bool = False) -> list[LearnerRow]:
        """Return the rows to send now, in order, at most those of one message. Count them as sent."""
        if now < self._not_before and not at_once:
            return []
        rows = [row for row in self._rows if row.number > self._sent][:MOST_ROWS]
        if rows:
            self._sent, self._not_before = rows[-1].number, now + GATHER_S
        return rows

    def send_again(self) -> None:
        """Make all rows due that are not stored: the broker may be a new one, or a message was not sent."""
        self._sent = 0

    def stored(self, newest: Version) -> None:
        """Forget the rows up to (epoch, number), which are in Redis."""
        while self._rows and (self._rows[0].epoch, self._rows[0].number) <= newest:
            self._rows.popleft()

    def _leave_out(self, name: str, value: float) -> None:
        if len(self._not_finite) < MOST_VALUES:
            self._not_finite.add(name)
        if name not in self._told and len(self._told) < MOST_VALUES:
            self._told.add(name)
            log.warning("metric %s is %s: it is left out of the logged rows while it is not finite", name, value)


def _number(name: str, value: Any) -> float:
    if not is_metric_name(name):
        raise ValueError(f"{brief(name, 120)} is no name for a metric; take 1 to 100 printable ASCII characters")
    value = math.nan if np.ma.is_masked(value) else value  # its item() is 0
    try:
        return float(value.item() if hasattr(value, "item") else value)  # a tensor's float() may warn
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"metric {name} was given {brief(value, 60)}, which is no single number") from error
