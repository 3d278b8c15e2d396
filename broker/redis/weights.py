"""The newest weights in Redis, as a blob in pieces (`blob.py`)."""

from __future__ import annotations

import redis

from headrace.broker.redis.blob import RedisBlob
from headrace.schemas.accounts.redis_keys import WEIGHTS_BLOB, WEIGHTS_CURRENT

LARGEST_BYTES = 64 << 20


def weights_in(client: redis.Redis, fleet_id: str) -> RedisBlob:
    """Return access to the weights of one fleet: the frames of a WEIGHTS message as they were published."""
    return RedisBlob(client, fleet_id, WEIGHTS_CURRENT, WEIGHTS_BLOB, LARGEST_BYTES)
