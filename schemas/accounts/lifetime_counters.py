"""The fleet's lifetime counters in Redis: their table, and how to read them off the books.

A counter that a worker counts needs nothing here: its row stands in `WorkerTotals` (`ledger.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter

from headrace.schemas.accounts.figures import Metric
from headrace.schemas.accounts.folded_lives import FoldedLives
from headrace.schemas.accounts.ledger import COUNTERS, Discard, Drop, LedgerRow, WorkerTotals
from headrace.schemas.accounts.redis_keys import labelled, unlabelled
from headrace.schemas.accounts.worker_figures import BLOCKED_BY

ACCEPTED_BYTES, COMMITTED_BYTES = "accepted_bytes_total", "committed_bytes_total"
SAMPLED_BYTES, ABORTED_EPISODES = "sampled_bytes_total", "aborted_episodes_total"
FENCED_LIVES, WORKER_WAIT = "fenced_lives_total", "worker_wait_s_total"

_OF_LIVES = (
    Metric(
        SAMPLED_BYTES,
        "bytes",
        "of the arrays in batches that workers cut, before compression, as of each worker's last heartbeat",
    ),
    Metric(ACCEPTED_BYTES, "bytes", "of batches that the broker accepted, as received"),
    Metric(
        COMMITTED_BYTES,
        "bytes",
        "of those of these batches that the learner committed. Where it left out chunks, a share of their number. A "
        "broker counts those that it had in memory itself",
    ),
    Metric(
        ABORTED_EPISODES,
        "episodes",
        "that were given up before their end, as batches tell: an env failed, a client was lost, or a worker left",
        shown="Aborted episodes; return {aborted_return_mean}, of finished ones {episode_return_mean}; length "
        "{aborted_len_mean}, of finished ones {episode_len_mean}",
        chart="Failures: episodes aborted",
    ),
    Metric(
        *(FENCED_LIVES, "lives", "of workers that the broker fenced: a newer life has their slot"),
        chart="Failures: lives of workers fenced",
    ),
    Metric(
        WORKER_WAIT,
        "s",
        "that workers waited before they sampled on, in whole seconds of each life, by what they waited for: room in "
        "the window, the next round, or consumer groups that alone leave no room",
        "reason",
        values=BLOCKED_BY,
    ),
)
"""Counters that the broker counts for each life, or takes from heartbeats. The ledger's rows do not have them."""
_NAMES_OF_LIVES = frozenset(metric.name for metric in _OF_LIVES)

_OF_TOTALS: dict[str, Callable[[WorkerTotals], int]] = {
    row.metric.name: attrgetter(row.value or name) for name, row in COUNTERS.items() if row.metric
}

_OF_ROW: tuple[tuple[Metric, Callable[[LedgerRow], int]], ...] = (
    (
        Metric("accepted_agent_steps_total", "agent steps", "in batches that the broker accepted, each counted once"),
        lambda row: row.accepted[0],
    ),
    (Metric("accepted_chunks_total", "chunks", "in these batches"), lambda row: row.accepted[1]),
    (
        Metric("settled_batches_total", "batches", "committed or dropped, with all before them"),
        lambda row: row.settled.seq,
    ),
    (
        Metric(
            *("committed_agent_steps_total", "agent steps", "committed by the learner"),
            column="committed_steps",
            chart="Throughput, steps/s: agent steps committed",
        ),
        lambda row: row.settled.committed[0],
    ),
    (Metric("committed_chunks_total", "chunks", "committed by the learner"), lambda row: row.settled.committed[1]),
)

_BY_MODULE = Metric(
    "accepted_module_agent_steps_total", "agent steps", "in accepted batches, by the module that acted", "module"
)
_LOST = "Steps that did not reach the learner, agent steps"
_DISCARDED = Metric(
    *("discarded_agent_steps_total", "agent steps", "that never became a chunk", "reason"),
    values=tuple(Discard),
    column="discarded_steps",
    chart=f"{_LOST}: discarded",
)
_DROPPED = Metric(
    *("dropped_agent_steps_total", "agent steps", "cut and never committed", "reason"),
    values=tuple(Drop),
    column="dropped_steps",
    shown="Agent steps lost: {lost}; {lost_share}",
    chart=f"{_LOST}: dropped",
)
_DROPPED_CHUNKS = Metric("dropped_chunks_total", "chunks", "cut and never committed", "reason", values=tuple(Drop))

COUNTER_TABLE = (
    *(row.metric for row in COUNTERS.values() if row.metric),
    _DISCARDED,
    _DROPPED,
    _DROPPED_CHUNKS,
    *(metric for metric, _ in _OF_ROW),
    _BY_MODULE,
    *_OF_LIVES,
)
"""Counters of `totals` and `sources`. Those of what workers take count up to the last batch that the broker accepted,
or up to the worker's end. A step of all agents that act at once is one env step and several agent steps.

`row_counters` reads all but `_OF_LIVES` off a ledger row.
"""


def folded_counters(lives: FoldedLives) -> dict[str, int]:
    """Return the lifetime counters that folded lives stand for."""
    return {**row_counters(lives.row), **lives.counters}


def without_row_counters(counters: Mapping[str, int]) -> dict[str, int]:
    """Return those of the lifetime counters that no ledger row stands for."""
    return {name: count for name, count in counters.items() if unlabelled(name)[0] in _NAMES_OF_LIVES}


def row_counters(row: LedgerRow) -> dict[str, int]:
    """Return the lifetime counters that one ledger row stands for.

    The broker reports them, and the audit compares them.
    """
    counters = {name: value(row.totals) for name, value in _OF_TOTALS.items()}
    counters |= {metric.name: value(row) for metric, value in _OF_ROW}
    for module_id, steps in row.totals.module_steps.items():
        counters[labelled(_BY_MODULE.name, "module", module_id)] = steps
    for reason, steps in row.totals.discarded.items():
        counters[labelled(_DISCARDED.name, "reason", reason)] = steps
    for reason, (steps, chunks) in _dropped(row):
        for metric, count in ((_DROPPED, steps), (_DROPPED_CHUNKS, chunks)):
            name = labelled(metric.name, "reason", reason)
            counters[name] = counters.get(name, 0) + count
    return counters


def _dropped(row: LedgerRow) -> Iterator[tuple[str, tuple[int, int]]]:
    for drops in (row.totals.dropped, row.lost, row.settled.dropped):
        yield from drops.items()
