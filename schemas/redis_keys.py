"""Every Redis key of a fleet: a public, versioned contract for dashboards, `headrace audit`, `top` and exporters.

All keys bear the fleet's hash tag, so that scripts over several of them work on a Redis Cluster. Values are integers,
decimal numbers and JSON; nothing that needs code to read. Each key names its writer; all others only read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

from headrace.schemas.ledger import LedgerRow

CONTRACT_VERSION = 1


@dataclass(frozen=True, slots=True)
class Key:
    """One key: `name` after the prefix, Redis type, unit, writer, meaning."""

    name: str
    type: str
    unit: str
    writer: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Metric:
    """One field of `totals` or `gauges`: its name (with a reason in braces where there are several), unit, meaning."""

    name: str
    unit: str
    meaning: str


FLEET = Key(
    "fleet",
    "hash",
    "",
    "broker",
    "contract_version, fleet_id, started_unix_s (of the reporter), reported_unix_s (of its last report), "
    "event_source and event_number (the last event in `events`, so that a repeated one is known)",
)
LEDGER = Key(
    "ledger",
    "hash",
    "steps, chunks",
    "broker",
    'field "slot/incarnation": JSON of schemas.ledger.LedgerRow; all rows of a report are written in one script call',
)
TOTALS = Key(
    "totals",
    "hash",
    "count",
    "broker",
    "lifetime counters of the fleet, named as Prometheus would (`env_steps_total`, ...); they never go back",
)
SOURCES = Key(
    "sources",
    "hash",
    "count",
    "broker",
    'field "slot/incarnation/counter": the value last merged into `totals`; what makes a repeated report harmless',
)
GAUGES = Key("gauges", "hash", "as named", "broker", "newest values, as in GAUGE_TABLE; all are replaced together")
WORKERS = Key("workers", "hash", "", "broker", 'field "slot": JSON of the newest state of the worker in that slot')
LEASE = Key("lease", "hash", "", "broker", "learner epoch, token and since when it holds the lease (unix s)")
INCARNATIONS = Key("incarnations", "hash", "count", "broker", 'field "slot": highest incarnation ever given out')
WEIGHTS_CURRENT = Key(
    "weights:current",
    "string",
    "",
    "broker",
    'newest published weights as "epoch/seq"; flipped once the blob stands, never to an older version',
)
WEIGHTS_BLOB = Key(
    "weights:blob:{version}",
    "hash",
    "bytes",
    "broker",
    'frames of that WEIGHTS message: "sizes" is JSON of bytes a frame, "frame/piece" holds at most 1 MiB of one; '
    "expires unless the pointer was flipped to it",
)
RUNNER_STATE = Key(
    "runner_state",
    "hash",
    "count",
    "broker",
    'field "slot": JSON of the lifetime counters of that slot\'s runner (schemas.runner_counters), as of its last '
    "heartbeat; a new worker in the slot goes on counting from them",
)
EVENTS = Key("events", "stream", "", "broker", "newest 1,000 events: joined, lost, fenced, failed, with fields as text")
METRICS = Key(
    "metrics",
    "hash",
    "as logged",
    "broker",
    "field name of a metric that callbacks logged: JSON of schemas.logged_metrics.LoggedMetric, merged over workers; "
    "sums are since the fleet's first run",
)
METRIC_SUMS = Key(
    "metric_sums",
    "hash",
    "as logged",
    "broker",
    'field "slot", or "past" for all earlier lives: JSON of schemas.logged_metrics.SumsOfLife, from which the next '
    "broker goes on adding",
)
POLICIES = Key(
    "policies",
    "hash",
    "return",
    "broker",
    "field module id, where envs have several agents: JSON of return_mean, return_min, return_max and agents, over the "
    "newest agents, at most 100, that ended an episode under this policy",
)
LEARNER_ROWS = Key(
    "learner_rows",
    "stream",
    "as logged",
    "broker",
    'what learners logged, the newest 4,000 rows at least. The id of a row is "epoch-number" (schemas.messages.'
    "LearnerRow), so Redis refuses a repeated row, and a reader goes on after the last id it has. Fields: weights_seq; "
    "unix_s and env_steps (of the fleet) when the broker got it; values, as JSON by name",
)

TABLE = (
    FLEET,
    LEDGER,
    TOTALS,
    SOURCES,
    GAUGES,
    WORKERS,
    LEASE,
    INCARNATIONS,
    WEIGHTS_CURRENT,
    WEIGHTS_BLOB,
    RUNNER_STATE,
    EVENTS,
    METRICS,
    METRIC_SUMS,
    POLICIES,
    LEARNER_ROWS,
)


COUNTER_TABLE = (
    Metric("env_steps_total", "steps", "in batches the broker accepted for the first time"),
    Metric("chunks_total", "chunks", "in those batches"),
    Metric("batches_total", "batches", "cut by workers, up to the last accepted one, or to a worker's end"),
    Metric("env_steps_sampled_total", "env steps", "of workers' envs, one for all agents that acted, up to that batch"),
    Metric("agent_steps_sampled_total", "steps", "stepped by workers, up to that batch"),
    Metric("module_steps_{module}_total", "steps", "of `env_steps_total`, those of one module's agents"),
    Metric("episodes_total", "episodes", "finished, up to that batch"),
    Metric("env_failures_total", "failures", "of sub-environments, up to that batch"),
    Metric("env_rebuilds_total", "rebuilds", "of sub-environments, up to that batch"),
    Metric("settled_batches_total", "batches", "committed or dropped, with all before them"),
    Metric("committed_steps_total", "steps", "committed by the learner"),
    Metric("committed_chunks_total", "chunks", "committed by the learner"),
    Metric("discarded_steps_{reason}_total", "steps", "that never became a chunk; reasons: schemas.ledger.Discard"),
    Metric("dropped_steps_{reason}_total", "steps", "cut and never committed; reasons: schemas.ledger.Drop"),
    Metric("dropped_chunks_{reason}_total", "chunks", "cut and never committed; reasons: schemas.ledger.Drop"),
    Metric("bytes_total", "bytes", "of accepted batches, as received"),
)
"""Counters of `totals` and `sources`. A step is an agent's, as in the ledger; in an env of one agent it is the env's.
`row_counters` reads all but bytes_total off a ledger row.
"""

GAUGE_TABLE = (
    Metric("env_steps_per_s", "env steps/s", "in accepted batches, over the last seconds"),
    Metric("episode_return_mean", "return", "of the last `episodes_window` finished episodes"),
    Metric("episode_return_min", "return", "of those episodes"),
    Metric("episode_return_max", "return", "of those episodes"),
    Metric("episode_len_mean", "env steps", "of those episodes"),
    Metric("episode_len_min", "env steps", "of those episodes"),
    Metric("episode_len_max", "env steps", "of those episodes"),
    Metric("episodes_window", "episodes", "that these are taken over, at most 100"),
    Metric("weights_seq", "version", "seq of the newest published weights"),
    Metric("learner_epoch", "epoch", "of the learner that holds the lease"),
    Metric("held_batches", "batches", "accepted and neither committed nor dropped"),
    Metric("oldest_unsettled_age_s", "s", "since the oldest held batch was accepted"),
    Metric("redis_failures", "attempts", "to reach Redis that failed since the broker started"),
)


def source_name(slot: int, incarnation: int) -> str:
    """Return the field of `ledger` about one incarnation, which is also the beginning of its fields of `sources`."""
    return f"{slot}/{incarnation}"


def row_counters(row: LedgerRow) -> dict[str, int]:
    """Return the lifetime counters that one ledger row stands for.

    The broker reports them, and the audit compares them.
    """
    totals, settled = row.totals, row.settled
    counters = {
        "env_steps_total": row.accepted[0],
        "chunks_total": row.accepted[1],
        "batches_total": totals.seq,
        "env_steps_sampled_total": totals.steps_of_envs,
        "agent_steps_sampled_total": totals.stepped,
        "episodes_total": totals.episodes,
        "env_failures_total": totals.env_failures,
        "env_rebuilds_total": totals.env_rebuilds,
        "settled_batches_total": settled.seq,
        "committed_steps_total": settled.committed[0],
        "committed_chunks_total": settled.committed[1],
    }
    for module_id, steps in totals.module_steps.items():
        counters[f"module_steps_{module_id}_total"] = steps
    for reason, steps in totals.discarded.items():
        counters[f"discarded_steps_{reason}_total"] = steps
    for reason, (steps, chunks) in _dropped(row):
        for name, count in ((f"dropped_steps_{reason}_total", steps), (f"dropped_chunks_{reason}_total", chunks)):
            counters[name] = counters.get(name, 0) + count
    return counters


def _dropped(row: LedgerRow) -> Iterator[tuple[str, tuple[int, int]]]:
    for drops in (row.totals.dropped, row.lost, row.settled.dropped):
        yield from drops.items()


def without_password(url: str) -> str:
    """Replace the password in a URL by `***`, for logs and errors."""
    try:
        parts = urlsplit(url)
        hidden = "password=" in parts.query
        if parts.password is None and not hidden:
            return url
        user, _, address = parts.netloc.rpartition("@")
        shown = f"{user.partition(':')[0]}:***@{address}" if parts.password is not None else parts.netloc
        return urlunsplit(parts._replace(netloc=shown, query="" if hidden else parts.query))
    except ValueError:
        return "(malformed URL)"


def key_name(fleet_id: str, key: Key, **parts: str) -> str:
    """Return the full name in Redis, as in `headrace:{my-fleet}:totals`."""
    return f"headrace:{{{fleet_id}}}:{key.name.format(**parts)}"
