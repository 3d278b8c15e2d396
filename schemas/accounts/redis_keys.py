"""Every Redis key of a fleet: a public, versioned contract for dashboards, `headrace audit`, `top` and exporters.

All keys bear the fleet's hash tag, so that scripts over several of them work on a Redis Cluster. Values are integers,
decimal numbers and JSON; nothing that needs code to read. Each key names its writer; all others only read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

CONTRACT_VERSION = 2


@dataclass(frozen=True, slots=True)
class Key:
    """One key: `name` after the prefix, Redis type, unit, writer, meaning, and further facts for the reference.

    - when: the moment at which it is written; "" for each report that has news of it.
    - expires: when Redis deletes it; "" if it stays until `headrace redis forget`.
    - example: a field and its value, or the value of a string.
    """

    name: str
    type: str
    unit: str
    writer: str
    meaning: str
    example: str = ""
    when: str = ""
    expires: str = ""


@dataclass(frozen=True, slots=True)
class Metric:
    """A value of `totals` or `gauges`. With a `label` it has a field for each value of that (see `labelled`).

    `counts`: True for a gauge that counts since the broker started, and so only grows. Prometheus gets it as a counter.
    """

    name: str
    unit: str
    meaning: str
    label: str = ""
    counts: bool = False


TOLD_SETTINGS = (
    "broker.lease_s",
    "broker.max_batch_bytes",
    "broker.max_held_batches",
    "broker.max_held_bytes",
    "broker.overflow",
    "fleet.env_hosts",
    "fleet.run_dir",
    "fleet.workers",
    "sampling.env_placement",
    "sampling.env_reset_timeout_s",
    "sampling.env_restart_attempts",
    "sampling.env_step_timeout_s",
    "sampling.num_envs",
    "sampling.synchronous",
    "serving.enabled",
    "supervisor.hung_after_s",
    "supervisor.restart_attempts",
    "worker.connect_timeout_s",
    "worker.random_actions_before_weights",
    "worker.window_batches",
)
"""Settings that the broker tells in `fleet`, so that `headrace why` can judge the fleet by Redis alone. No secrets."""

FLEET = Key(
    "fleet",
    "hash",
    "",
    "broker",
    "contract_version, fleet_id, env (`sampling.env`), version (of Headrace, at the broker), settings (JSON: the "
    "values, by name, of the settings by which `headrace why` judges, as the broker has them; "
    "`worker.window_batches` is the one in force), refused (JSON: [peer, kind, count] of the three kinds of refused "
    "messages with the most since the broker started), joins_blocked (why no peer can join now, as text; empty where "
    "peers can), started_unix_s (of the reporter), reported_unix_s (of its last "
    "report), ended_unix_s (of the last report of a broker that has stopped in order; the next broker removes it, so a "
    "fleet without it and without reports has not ended in order), event_source and event_number (the last event in "
    "`events`, so that a repeated one is known), written (the last part of a report; where it is another, Redis has "
    "lost or got something, and the broker reports all again)",
    example="reported_unix_s 1795280623.412",
    when="each report",
)
LEDGER = Key(
    "ledger",
    "hash",
    "steps, chunks",
    "broker",
    'field "slot/incarnation": JSON of accounts.ledger.LedgerRow, for the live worker of a slot and its newest ended '
    "one; a row and its counters in `sources` are written in one script call",
    example='0/2 {"slot":0,"incarnation":2,"totals":{"seq":12,"stepped":6144,...},"closed":false,...}',
)
FOLDED = Key(
    "folded",
    "hash",
    "steps, chunks",
    "broker",
    'field "slot": JSON of accounts.folded_lives.FoldedLives, the sum of all older lives of the slot; the script call '
    "that adds a life removes its row and counters",
    example='0 {"highest":9,"missing":[],"row":{...},"counters":{"accepted_bytes_total":1830144}}',
    when="when lives have ended, and Redis and the learner know all of them",
)
TOTALS = Key(
    "totals",
    "hash",
    "count",
    "broker",
    "lifetime counters of the fleet, named as Prometheus would (`env_steps_total`, ...); they never go back",
    example='dropped_agent_steps_total{reason="stale"} 512',
)
SOURCES = Key(
    "sources",
    "hash",
    "count",
    "broker",
    'field "slot/incarnation/counter": the value last merged into `totals`; what makes a repeated report harmless; '
    "incarnation 0 stands for the folded lives of the slot",
    example="0/2/accepted_chunks_total 96",
)
GAUGES = Key(
    "gauges",
    "hash",
    "as named",
    "broker",
    "newest values, as in GAUGE_TABLE; all are replaced together; they expire when no broker reports",
    example="env_steps_per_s 41230.5",
    when="each report",
    expires="after 15 s, or 20 intervals of reports if that is longer",
)
WORKERS = Key(
    "workers",
    "hash",
    "",
    "broker",
    'field "slot": JSON of the newest state of the worker in that slot, of unix_s; the key expires when no broker '
    "reports. WORKER_TABLE has its members",
    example='0 {"unix_s":1795280623.4,"pid":4711,"weights_behind":1,...}',
    expires="as `gauges`",
)
LEASE = Key(
    "lease",
    "hash",
    "",
    "broker",
    "unix_s (of these values), epoch (of the learner), token (its digest), since_unix_s (since when it holds it), "
    "connected (1 or 0, as of unix_s: once `gauges` have expired, no broker knows), committed_unix_s (when it last "
    "committed), heard_unix_s (when the broker last heard of it), waiting (1 while its user waits for a batch and none "
    "is on its way, else 0), and what the learner tells of itself: host, pid, program (its script, or "
    "`python -m MODULE`), headrace_version, torch_threads (of one operation) and cores (that it may use), which are 0 "
    "or empty where it does not. It stays, so no later learner gets a lower epoch",
    example="epoch 3",
    when="each report",
)
INCARNATIONS = Key(
    "incarnations",
    "hash",
    "count",
    "broker",
    'field "slot": highest incarnation ever given out',
    example="0 4",
)
WEIGHTS_CURRENT = Key(
    "weights:current",
    "string",
    "",
    "broker",
    'newest published weights as "epoch/seq"; flipped once the blob stands, never to an older version',
    example="3/1207",
    when="at most once a second, and within `redis.bytes_per_hour`",
)
WEIGHTS_BLOB = Key(
    "weights:blob:{version}",
    "hash",
    "bytes",
    "broker",
    'frames of that WEIGHTS message: "sizes" is JSON of bytes a frame, "frame/piece" holds at most 1 MiB of one; '
    "expires unless the pointer was flipped to it",
    example="0/0 (bytes)",
    when="before the pointer",
    expires="after some seconds, unless the pointer was flipped to it",
)
CHECKPOINT_CURRENT = Key(
    "checkpoint:current",
    "string",
    "",
    "supervisor",
    'the learner\'s newest checkpoint as "epoch/saves"; flipped once the blob stands, never to an older one',
    example="3/41",
    when="after a save of the learner, and within `redis.bytes_per_hour`",
)
CHECKPOINT_BLOB = Key(
    "checkpoint:blob:{version}",
    "hash",
    "bytes",
    "supervisor",
    'the file learner.checkpoint: "sizes" is JSON of its bytes, "0/piece" holds at most 1 MiB of it, "about" is JSON '
    "of its digest, the unix time of its save and the fleet's env steps; expires unless the pointer was flipped to it",
    example='about {"digest":"9f2c...","unix_s":1795280623.4,"env_steps":81920}',
    when="before the pointer",
    expires="after some minutes, unless the pointer was flipped to it",
)
RUNNER_STATE = Key(
    "runner_state",
    "hash",
    "count",
    "broker",
    'field "slot": JSON of the lifetime counters of that slot\'s runner (accounts.runner_counters), as of its last '
    "heartbeat; a new worker in the slot goes on counting from them",
    example='0 {"num_env_steps_sampled_lifetime":40960,...}',
)
EVENTS = Key(
    "events",
    "stream",
    "",
    "broker",
    "newest 1,000 events, each with `event` and unix_s, as text: `broker` (a broker has started), `learner` (a new "
    "learner has got the lease: epoch), and of a worker, with slot and incarnation: `joined` (incarnation 1 in a new "
    "slot; a higher one after a restart, and the same one where it was lost before), `lost` (its connection), or the "
    "reason of its end, such as `shutdown`, `worker_killed` or `fenced`",
    example="1795280623412-0 event lost slot 1 incarnation 3 unix_s 1795280623.4",
    when="as it happens",
)
METRICS = Key(
    "metrics",
    "hash",
    "as logged",
    "broker",
    "field name of a metric that callbacks logged: JSON of accounts.logged_metrics.LoggedMetric, merged over workers; "
    "sums are since the fleet's first run",
    example='goals {"reduce":"sum","value":17.0,"count":17}',
    when="each report",
    expires="as `gauges`, but not after the last report of a broker that stopped in order",
)
METRIC_SUMS = Key(
    "metric_sums",
    "hash",
    "as logged",
    "broker",
    'field "slot", or "past" for all earlier lives: JSON of accounts.logged_metrics.SumsOfLife, from which the next '
    "broker goes on adding",
    example='0 {"incarnation":4,"sums":{"goals":9.0}}',
    when="each report",
)
PAST = "past"
"""The field of `METRIC_SUMS` with the sums of earlier lives. The other fields are slots."""

POLICIES = Key(
    "policies",
    "hash",
    "return, agent steps",
    "broker",
    "field module id, where envs have several agents: JSON of return_mean, return_min, return_max, len_mean, len_min, "
    "len_max (agent steps; absent where workers of an earlier version do not tell them), agents, and quantiles of the "
    "returns (value by quantile, as of the gauges), over the newest agents, at most 100, that ended an episode under "
    "this policy",
    example='hunter {"return_mean":3.5,"return_min":1.0,"return_max":7.0,"len_mean":41.2,...}',
    when="each report",
    expires="as `metrics`",
)
ERRORS = Key(
    "errors",
    "hash",
    "failures",
    "broker",
    "field fingerprint, of kind, env, exception and where: JSON of a group of failures of envs over all workers and "
    "lives: these four, message and traceback (4 KiB) of one of them, count, first_unix_s, last_unix_s, slots (the "
    "newest 8), lives (what of count the newest life of a slot has told, from which the next broker goes on). At most "
    '100 groups; those seen the longest ago are summed up in field "others". Text is as the env wrote it, with control '
    "characters",
    example='9f2c41d07be35a68 {"kind":"env_exception","env":"MyEnv-v0","exception":"RuntimeError","count":7,...}',
)
LEARNER_ROWS = Key(
    "learner_rows",
    "stream",
    "as logged",
    "broker",
    'what learners logged, the newest 4,000 rows at least. The id of a row is "epoch-number" (schemas.messages.'
    "LearnerRow), so Redis refuses a repeated row, and a reader goes on after the last id it has. Fields: weights_seq; "
    "unix_s and env_steps (of the fleet) when the broker got it; values, as JSON by name",
    example='3-1207 weights_seq 1207 unix_s 1795280623.4 env_steps 81920 values {"loss":0.41}',
    when="as it comes",
)
_HISTORY = (
    "the gauges and totals as they stood; the id of an entry is its time in unix ms, a multiple of the interval. "
    "Gauges that are no whole numbers have six digits. Counters by module and gauges that are times are left out. "
    "Written by the call that writes the gauges, so each entry is of one moment"
)
HISTORY_5S = Key(
    "history:5s",
    "stream",
    "as in gauges and totals",
    "broker",
    f"the newest hour: {_HISTORY}",
    example="1795280625000-0 env_steps_per_s 41230.5 env_steps_total 81920 ...",
    when="every 5 s",
)
HISTORY_60S = Key(
    "history:60s",
    "stream",
    "as in gauges and totals",
    "broker",
    f"the newest 24 hours: {_HISTORY}",
    example="1795280640000-0 env_steps_per_s 41230.5 env_steps_total 81920 ...",
    when="every minute",
)
RINGS = ((HISTORY_5S, 5, 720), (HISTORY_60S, 60, 1440))
"""(key, interval in seconds, most entries)."""

PROCESSES = Key(
    "processes",
    "hash",
    "",
    "supervisor",
    "field name: JSON of accounts.process_state.ProcessState, for the supervisor itself and each process that it keeps "
    "alive, broker, learner and the fleet's own Redis included; all are replaced together; that of the supervisor has "
    "disk_free_bytes, of the disk of the run directory",
    example='worker-0 {"name":"worker-0","role":"worker","slot":0,"pid":4711,"state":"running","cpu_s":12.5,...}',
    when="every 5 s, and when a process starts or ends",
    expires="after 30 s",
)

HOLDER = Key(
    "holder",
    "string",
    "",
    "supervisor",
    "host and run directory of the `headrace up` that has the fleet, or that it has started this Redis; another one "
    "waits while this stands, and is refused once this is renewed",
    example="node-7 /runs/a",
    when="as `processes`, and removed at its end",
    expires="after 30 s",
)
SUPERVISOR_TOTALS = Key(
    "supervisor_totals",
    "hash",
    "count",
    "supervisor",
    "lifetime counters of the supervisor, named as in `totals`; they never go back",
    example='restarts_total{role="worker"} 3',
    when="as `processes`",
)
RESTARTS = Metric("restarts_total", "restarts", "of processes by the supervisor", "role")

CHECK = Key(
    "check:{one}",
    "any",
    "",
    "supervisor",
    "written and deleted before a start, to see whether the fleet may use each command that it needs",
)

TABLE = (
    FLEET,
    LEDGER,
    FOLDED,
    TOTALS,
    SOURCES,
    GAUGES,
    WORKERS,
    LEASE,
    INCARNATIONS,
    WEIGHTS_CURRENT,
    WEIGHTS_BLOB,
    CHECKPOINT_CURRENT,
    CHECKPOINT_BLOB,
    RUNNER_STATE,
    EVENTS,
    METRICS,
    METRIC_SUMS,
    POLICIES,
    ERRORS,
    LEARNER_ROWS,
    HISTORY_5S,
    HISTORY_60S,
    PROCESSES,
    HOLDER,
    SUPERVISOR_TOTALS,
)
"""All keys that stay. `CHECK` does not."""


SESSIONS_REVOKED, GONE_KEY = "sessions_revoked", "removed"

QUANTILES = ("0.05", "0.25", "0.5", "0.75", "0.95")
ACCEPTED_LAG, CONSUMED_LAG = "accepted_lag_agent_steps_bucket", "consumed_lag_agent_steps_bucket"
LEARNER_TIME = "learner_time_share"
WORKER_RATE, MANY_WORKERS = "worker_env_steps_per_s_quantile", 17

_OF_PROCESS = "of the broker's and the learner's own process; absent where the system does not tell"

GAUGE_TABLE = (
    Metric("unix_s", "s", "time of these values, by the broker's clock"),
    Metric("env_steps_per_s", "env steps/s", "in accepted batches, over the last seconds"),
    Metric("episode_return_mean", "return", "of the last `episodes_window` finished episodes"),
    Metric("episode_return_min", "return", "of those episodes"),
    Metric("episode_return_max", "return", "of those episodes"),
    Metric("episode_len_mean", "env steps", "of those episodes"),
    Metric("episode_len_min", "env steps", "of those episodes"),
    Metric("episode_len_max", "env steps", "of those episodes"),
    Metric("episode_return_quantile", "return", "of those episodes, linear between two of them", "quantile"),
    Metric("episode_len_quantile", "env steps", "of those episodes, linear between two of them", "quantile"),
    Metric("episodes_window", "episodes", "that these are taken over, at most 100"),
    Metric("weights_seq", "version", "seq of the newest published weights"),
    Metric("learner_epoch", "epoch", "of the learner that holds the lease"),
    Metric(
        "messages_refused", "messages", "of peers, or claims in them, refused since the broker started", counts=True
    ),
    Metric("held_batches", "batches", "accepted and neither committed nor dropped"),
    Metric("held_bytes", "bytes", "of those of these batches that the broker has in memory"),
    Metric("held_agent_steps", "agent steps", "in these batches"),
    Metric(
        ACCEPTED_LAG,
        "agent steps",
        "accepted since the broker started in batches whose weights were at most `le` versions behind the newest at "
        "that moment, by the newest weights in the batch; those of an earlier learner are behind all versions of the "
        "present one",
        "le",
    ),
    Metric(
        CONSUMED_LAG,
        "agent steps",
        "given to the learner's user since the broker started, of weights at most `le` versions behind the newest at "
        "that moment, each step by its own weights",
        "le",
    ),
    Metric(
        LEARNER_TIME,
        "1",
        "share of the learner's time by part: wait (for data), decode, train (with commits and checkpoints), publish; "
        "over 10 s or more before its last commit; absent without a learner",
        "part",
    ),
    Metric("process_cpu_share", "1", f"{_OF_PROCESS}: processor seconds per second", "role"),
    Metric("process_rss_bytes", "bytes", f"{_OF_PROCESS}: memory that it has", "role"),
    Metric("oldest_unsettled_age_s", "s", "since the oldest held batch was accepted"),
    Metric(
        "lost_lives_close_unix_s",
        "s",
        "time by which the books of lost workers are closed that newer ones have followed and of whose end no "
        "supervisor has told; absent without any",
    ),
    Metric(
        SESSIONS_REVOKED,
        "sessions",
        'ended since the broker started because their key, ROLE or ROLE.GROUP, was revoked; "removed": the file of '
        "the key is gone",
        "key",
        counts=True,
    ),
    Metric("redis_failures", "attempts", "to reach Redis that failed since the broker started", counts=True),
    Metric("aborted_return_mean", "return", "of the last `aborted_window` aborted episodes; absent before the first"),
    Metric("aborted_len_mean", "env steps", "of those episodes"),
    Metric(
        "aborted_window",
        "episodes",
        "that were given up before their end because an env failed, a client was lost, or a worker left or was "
        "killed; at most 100. Of those that a killed worker left open, what it had shipped counts. Where they are "
        "longer or shorter than finished ones, the learner's data is censored",
    ),
    Metric("workers", "workers", "connected"),
    Metric(
        "compression_ratio", "1", "of the arrays in these workers' batches to their messages, in bytes; absent at first"
    ),
    Metric("workers_blocked", "workers", "that wait, by what they wait for", "reason"),
    Metric("window_batches", "batches", "that workers keep, since they are not settled; some are on their way"),
    Metric("window_bytes", "bytes", "of those of these batches that workers have in memory"),
    Metric(
        WORKER_RATE,
        "env steps/s",
        f"of single workers, linear between two of them; absent for fewer than {MANY_WORKERS} workers",
        "quantile",
    ),
    Metric("worker_time_share", "1", "of the workers' recent time, on average; the parts sum to 1", "part"),
    Metric("clients", "sessions", "of clients at all policy servers; absent without one"),
    Metric("client_requests_per_s", "requests/s", "of these clients, over the last seconds"),
    Metric("client_latency_s", "s", "from a step's arrival to its answer, averaged over busy servers", "quantile"),
)

WORKER_TABLE = (
    Metric("unix_s", "s", "time of these values, by the broker's clock"),
    Metric("incarnation", "", "of the worker"),
    Metric("host", "", "on which it runs"),
    Metric("pid", "", "of its process there"),
    Metric("headrace_version", "", "of Headrace, there; empty where the worker does not tell it"),
    Metric("joined_unix_s", "s", "time at which it joined this broker"),
    Metric("weights_epoch", "epoch", "of the learner whose weights it uses"),
    Metric("weights_seq", "version", "of these weights"),
    Metric("weights_behind", "versions", "that these are older than the newest; -1 for an earlier learner's"),
    Metric("blocked", "", "window or round where it waits for that before it samples on, else empty"),
    Metric("blocked_since_unix_s", "s", "since when; absent where it does not wait"),
    Metric("env_steps", "env steps", "of this life, as of its last accepted batch"),
    Metric("env_steps_per_s", "env steps/s", "in accepted batches, over the last seconds"),
    Metric("episodes", "episodes", "finished in this life"),
    Metric("array_bytes", "bytes", "of the arrays in its batches of this life; absent before the first heartbeat"),
    Metric("sent_bytes", "bytes", "of these batches as messages, which compression makes smaller"),
    Metric("window_batches", "batches", "that it keeps, since they are not settled; absent before the first heartbeat"),
    Metric("window_bytes", "bytes", "of those of these batches that it has in memory"),
    Metric("accepted", "batch", "number of the last accepted batch"),
    Metric("settled", "batch", "number up to which its batches are committed or dropped"),
    Metric("held_batches", "batches", "accepted and neither committed nor dropped"),
    Metric("cpu_share", "1", "processor seconds of its process per second; absent before the first heartbeat"),
    Metric("rss_bytes", "bytes", "of memory that its process has, without processes of envs"),
    Metric("envs_cpu_share", "1", "processor seconds per second of processes or hosts of its envs; absent without"),
    Metric("envs_rss_bytes", "bytes", "of memory that these have together; what they share counts in each"),
    Metric("num_envs", "envs", "that step together"),
    Metric("envs_lost", "envs", "of these that are down: they wait to be rebuilt, or for a host"),
    Metric("env_silence_s", "s", "for which none of its envs has answered, while it waits for one"),
    Metric("env_call", "", "that has been in progress longest, in words; empty while its envs answer"),
    Metric("env_failures", "failures", "of its envs in this life; absent without any, as the next two"),
    Metric("env_failure", "", "the newest of these in words"),
    Metric("env_failure_age_s", "s", "since the broker heard of it"),
    Metric("time_share", "1", "of its recent time by part, which sum to 1; absent for the first seconds"),
    Metric(
        "env_hosts",
        "hosts",
        "connected, wanted so that all envs have a place, and versions of Headrace that they tell; absent without them",
    ),
    Metric("serving", "", "clients, requests_per_s, latency_p50_s and latency_p95_s; absent without a policy server"),
)
"""Members of the JSON of a worker in `workers`."""


_ESCAPES = (("\\", r"\\"), ('"', r"\""), ("\n", r"\n"))
_PLAIN = {escaped: plain for plain, escaped in _ESCAPES}
_ESCAPED = re.compile(r'\\[\\"n]')
_LABELLED = re.compile(r'([a-z_]+)\{([a-z_]+)="((?:[^\\"\n]|\\[\\"n])*)"\}')


def other_contract(version: bytes | None) -> str:
    """Return the `contract_version` of a `fleet` hash if it is not ours; "" if it is, or there is none."""
    seen = (version or b"").decode(errors="replace")
    return "" if seen == str(CONTRACT_VERSION) else seen


def revoked_sessions(gauges: Mapping[str, float]) -> dict[str, int]:
    """Return how many sessions ended because their key was revoked, by the name of the key."""
    found = {unlabelled(field): int(count) for field, count in gauges.items()}
    return {key: count for (name, _, key), count in found.items() if name == SESSIONS_REVOKED}


def source_name(slot: int, incarnation: int) -> str:
    """Return the field of `ledger` about one incarnation, which is also the beginning of its fields of `sources`."""
    return f"{slot}/{incarnation}"


def labelled(name: str, label: str, value: str) -> str:
    """Return the field of a metric for one value of its label: name{label="value"}.

    As in Prometheus, a backslash escapes each quote and backslash in the value, and a line break is written as
    backslash and n.
    """
    for plain, escaped in _ESCAPES:
        value = value.replace(plain, escaped)
    return f'{name}{{{label}="{value}"}}'


def unlabelled(field: str) -> tuple[str, str, str]:
    """Return (name, label, value) of a field that `labelled` made; for any other (field, "", "")."""
    found = _LABELLED.fullmatch(field)
    if found is None:
        return field, "", ""
    name, label, escaped = found.groups()
    return name, label, _ESCAPED.sub(lambda one: _PLAIN[one[0]], escaped)


def key_name(fleet_id: str, key: Key, **parts: str) -> str:
    """Return the full name in Redis, as in `headrace:{my-fleet}:totals`."""
    return f"headrace:{{{fleet_id}}}:{key.name.format(**parts)}"
