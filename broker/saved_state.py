"""The state that an earlier broker left in Redis, from which the next one goes on."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import redis

from headrace.broker.redis.blob import StoredBlob
from headrace.broker.redis.client import RedisReader
from headrace.broker.redis.parser import HashParser, SourceKey
from headrace.broker.redis.weights import weights_in
from headrace.schemas.accounts import redis_keys as keys
from headrace.schemas.accounts.env_errors import EnvErrorRow
from headrace.schemas.accounts.folded_lives import FoldedLives
from headrace.schemas.accounts.ledger import LedgerRow
from headrace.schemas.accounts.logged_metrics import SumsOfLife
from headrace.schemas.accounts.runner_counters import Counters

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SavedState:
    """The state in Redis when the reporter first reached it. Its form is checked; the frames are not decoded yet."""

    rows: dict[SourceKey, LedgerRow]
    folded: dict[int, FoldedLives]
    counters: dict[SourceKey, dict[str, int]]
    incarnations: dict[int, int]
    runner_state: dict[int, Counters]
    lease_epoch: int
    metric_sums: dict[str, SumsOfLife]
    env_errors: dict[str, EnvErrorRow]
    weights: StoredBlob | None


def read_saved_state(client: redis.Redis, fleet_id: str) -> SavedState:
    """Read what stands in Redis for this fleet. Log and leave out what cannot be read. May raise `REDIS_FAILURES`."""
    wanted = (
        keys.LEDGER,
        keys.FOLDED,
        keys.SOURCES,
        keys.INCARNATIONS,
        keys.LEASE,
        keys.RUNNER_STATE,
        keys.METRIC_SUMS,
        keys.ERRORS,
    )
    raw, wrong = RedisReader(client).hashes_at_once({key.name: keys.key_name(fleet_id, key) for key in wanted})
    values = HashParser(garbage=wrong)
    saved = SavedState(
        rows=values.rows(raw["ledger"]),
        folded=values.folded(raw["folded"]),
        counters=values.sources(raw["sources"]),
        incarnations=values.incarnations(raw["incarnations"]),
        runner_state=values.runner_state(raw["runner_state"]),
        lease_epoch=values.lease(raw["lease"]).get("epoch", 0),
        metric_sums=values.metric_sums(raw["metric_sums"]),
        env_errors=values.env_errors(raw["errors"]),
        weights=weights_in(client, fleet_id).load(),
    )
    for sentence in values.garbage:
        log.error("left out a value in Redis: %s", sentence)
    return saved
