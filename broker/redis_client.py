"""Access to Redis: short timeouts, no retries by the client, and failures in words.

The client must not retry by itself: a retried command whose first reply was lost runs twice. The caller knows which of
its writes are harmless to repeat, and decides (see `redis_scripts.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError
from redis.retry import Retry

from headrace.schemas.errors import RedisUnavailableError
from headrace.schemas.redis_keys import without_password

TIMEOUT_S = 0.25

REDIS_FAILURES = (RedisError, OSError)
"""Errors that any call may raise while Redis is away or refuses: no connection, time out, LOADING, NOAUTH, READONLY,
OOM.
"""


def connect(url: str, timeout_s: float = TIMEOUT_S) -> redis.Redis:
    """Return a client that connects when first used. Each send and each answer may take `timeout_s` seconds.

    Raises `RedisUnavailableError` for a URL that cannot be understood.
    """
    try:
        return redis.Redis.from_url(
            url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=Retry(NoBackoff(), 0), protocol=2
        )
    except (ValueError, TypeError) as error:
        raise RedisUnavailableError(without_password(url), f"it is not a Redis URL ({error})") from error


def in_words(error: BaseException) -> str:
    """Return one line that says why Redis did not do what was asked."""
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return text[:200]


@dataclass(frozen=True, slots=True)
class RedisReader:
    """The few typed reads that Headrace does. All results are bytes that any other program may have written."""

    client: redis.Redis

    def hash(self, key: str) -> dict[bytes, bytes]:
        """Return all fields of a hash; empty when there is none."""
        return dict(self._do("HGETALL", key))

    def field(self, key: str, field: str) -> bytes | None:
        """Return one field of a hash."""
        return _bytes(self._do("HGET", key, field))

    def text(self, key: str) -> bytes | None:
        """Return the value of a string key."""
        return _bytes(self._do("GET", key))

    def lengths(self, key: str, fields: Sequence[str]) -> list[int]:
        """Return the bytes in each of these fields of a hash, without fetching them; 0 for one that is absent."""
        with self.client.pipeline(transaction=False) as pipe:
            for field in fields:
                pipe.hstrlen(key, field)
            return [int(length) for length in pipe.execute()]

    def entries(self, key: str, after: str, most: int) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """Return up to `most` entries of a stream with ids above `after`; none for a key that is no stream."""
        try:
            found: Any = self.client.xrange(key, min=f"({after}", count=most)
        except ResponseError as error:
            if str(error).startswith("WRONGTYPE"):
                return []
            raise
        return [(identity, fields or {}) for identity, fields in found]

    def hashes_at_once(self, keys: Mapping[str, str]) -> tuple[dict[str, dict[bytes, bytes]], list[str]]:
        """Read several hashes as of one moment (MULTI). Return them by the names that `keys` gives them.

        A key that is not a hash counts as empty, and has a sentence in the second list.
        """
        with self.client.pipeline(transaction=True) as pipe:
            for key in keys.values():
                pipe.hgetall(key)
            answers = dict(zip(keys, pipe.execute(raise_on_error=False), strict=True))
        wrong = {name: answer for name, answer in answers.items() if not isinstance(answer, dict)}
        for answer in wrong.values():
            if not str(answer).startswith("WRONGTYPE"):
                raise answer
        return answers | {name: {} for name in wrong}, [f"{name}: is not a hash" for name in wrong]

    def _do(self, *command: str) -> Any:
        execute: Any = self.client.execute_command
        return execute(*command)


def _bytes(value: Any) -> bytes | None:
    return value if isinstance(value, bytes) else None
