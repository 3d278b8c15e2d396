"""The rows of learners in Redis: a stream that holds each row once, and the newest of them for a while."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import redis
from redis.exceptions import ResponseError

from headrace.schemas.accounts import redis_keys as keys
from headrace.schemas.basics.bounds import Version
from headrace.schemas.messages import LearnerRow

log = logging.getLogger(__name__)

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


class RedisRows:
    """Appends rows to the stream `learner_rows`."""

    def __init__(self, client: redis.Redis, fleet_id: str) -> None:
        self._client = client
        self._key = keys.key_name(fleet_id, keys.LEARNER_ROWS)
        self._refused = False

    def append(self, rows: Sequence[ReceivedRow]) -> None:
        """Append the rows that Redis lacks. May raise `REDIS_FAILURES` after appending some of them.

        Redis has a row if it has a newer one: Redis refuses ids that do not rise. Rows that the key's type refuses are
        dropped, and the log says so once.
        """
        with self._client.pipeline(transaction=False) as pipe:
            for received in rows:
                identity = f"{received.row.epoch}-{received.row.number}"
                pipe.xadd(self._key, _fields(received), id=identity, maxlen=MOST_ROWS, approximate=True)
            answers = pipe.execute(raise_on_error=False)
        for answer in answers:
            if not isinstance(answer, Exception) or "equal or smaller" in str(answer):
                continue
            if not (isinstance(answer, ResponseError) and str(answer).startswith("WRONGTYPE")):
                raise answer
            if not self._refused:
                self._refused = True
                log.error("%s in Redis is no stream: what the learner logs is not kept; delete that key", self._key)


def _fields(received: ReceivedRow) -> dict[Any, Any]:
    return {
        "weights_seq": str(received.row.weights_seq),
        "unix_s": f"{received.unix_s:.3f}",
        "env_steps": str(received.env_steps),
        "values": orjson.dumps(received.row.values),
    }
