"""The rows of learners in Redis: a stream that holds each row once, and the newest of them for a while."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import redis

from headrace.schemas.accounts import redis_keys as keys
from headrace.schemas.basics.bounds import Version
from headrace.schemas.messages import LearnerRow

MOST_ROWS = 4000
"""Rows that Redis keeps at least. At 20 values a row they take some 4 MB, and never above 80 MB."""


@dataclass(frozen=True, slots=True)
class ReceivedRow:
    """A learner's row, and when the broker got it: by its clock, and in env steps that the fleet had made."""

    row: LearnerRow
    unix_s: float
    env_steps: int

    @property
    def version(self) -> Version:
        """Return (epoch, number), which rises from row to row."""
        return (self.row.epoch, self.row.number)


def fields_of(received: ReceivedRow) -> dict[Any, Any]:
    """Return the fields of a row's entry in the stream."""
    row = received.row
    return {
        "weights_seq": str(row.weights_seq),
        "unix_s": f"{received.unix_s:.3f}",
        "env_steps": str(received.env_steps),
        "values": orjson.dumps(row.values).decode(),
    }


def append_rows(client: redis.Redis, fleet_id: str, rows: Sequence[ReceivedRow]) -> None:
    """Append the rows that Redis lacks to its stream. May raise `REDIS_FAILURES` after appending some of them.

    Redis has a row if it has a newer one: Redis refuses ids that do not rise.
    """
    key = keys.key_name(fleet_id, keys.LEARNER_ROWS)
    with client.pipeline(transaction=False) as pipe:
        for received in rows:
            row = received.row
            pipe.xadd(key, fields_of(received), id=f"{row.epoch}-{row.number}", maxlen=MOST_ROWS, approximate=True)
        answers = pipe.execute(raise_on_error=False)
    for answer in answers:
        if isinstance(answer, Exception) and "equal or smaller" not in str(answer):
            raise answer
