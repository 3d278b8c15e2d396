"""Every Redis key of a fleet: a public, versioned contract for dashboards, `headrace audit`, `top` and exporters.

All keys bear the fleet's hash tag, so that scripts over several of them work on a Redis Cluster. Values are integers,
decimal numbers and JSON; nothing that needs code to read. Each key names its writer; all others only read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from headrace.schemas.basics.bounds import MOST_TASKS, OTHER_TASKS

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


TOLD_SETTINGS = (
    "broker.lease_s",
    "broker.max_batch_bytes",
    "broker.max_held_batches",
    "broker.max_held_bytes",
    "broker.overflow",
    "broker.report_interval_s",
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
"""Settings that the broker tells in `fleet`, so that `why` and `audit` can judge by Redis alone. No secrets."""

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
    example='0 {"unix_s":1795280623.4,"pid":4711,"num_envs":8,...}',
    expires="as `gauges`",
)
LEASE = Key(
    "lease",
    "hash",
    "",
    "broker",
    "unix_s (of these values), epoch (of the learner), token (its digest), since_unix_s (known to this broker since), "
    "connected (1 or 0, as of unix_s: once `gauges` have expired, no broker knows), committed_unix_s (when it last "
    "committed), heard_unix_s (when the broker last heard of it), waiting (1 while its user waits for a batch and none "
    "is on its way, else 0), and what the learner tells of itself: host, pid, program (its script, or "
    "`python -m MODULE`), headrace_version, torch_threads (of one operation) and cores (that it may use), which are 0 "
    "or empty where it does not. It stays, so no later learner gets a lower epoch",
    example="epoch 3",
    when="each report",
)
CONSUMER_GROUPS = Key(
    "consumer_groups",
    "hash",
    "",
    "broker",
    "field name of a consumer group besides the learner's: JSON of accounts.consumer_groups.GroupRow; a group that "
    "is removed loses its fields here and in the next two keys",
    example='record {"on_slow":"wait","connected":true,"lag_steps":512,"committed":[81920,640],"dropped":{},...}',
    when="each report",
)
GROUP_LEDGER = Key(
    "group_ledger",
    "hash",
    "steps, chunks",
    "broker",
    'field "group/slot/incarnation": JSON of accounts.ledger.LedgerRow, as in `ledger`: `held` and `settled` are the '
    "group's own; what began before the group is dropped as `before_group`",
    example='record/0/2 {"slot":0,"incarnation":2,"totals":{"seq":12,"stepped":6144,...},"closed":false,...}',
)
GROUP_FOLDED = Key(
    "group_folded",
    "hash",
    "steps, chunks",
    "broker",
    'field "group/slot": JSON of accounts.folded_lives.FoldedLives, as in `folded`, without counters',
    example='record/0 {"highest":9,"missing":[],"row":{...},"counters":{}}',
    when="when lives have ended, and Redis and the group's reader know all of them",
)
OF_GROUPS = (CONSUMER_GROUPS, GROUP_LEDGER, GROUP_FOLDED)

INCARNATIONS = Key(
    "incarnations", "hash", "count", "broker", 'field "slot": highest incarnation ever given out', example="0 4"
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
    expires="after some minutes, unless the pointer was flipped to it",
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
    "newest 8), tasks (8 at most, of its newest failures; absent where none had a task), lives (what of count the "
    "newest life of a slot has told, from which the next broker goes on). At most 100 groups; those seen the longest "
    'ago are summed up in field "others". Text is as the env wrote it, with control characters',
    example='9f2c41d07be35a68 {"kind":"env_exception","env":"MyEnv-v0","exception":"RuntimeError","count":7,...}',
)
TASKS = Key(
    "tasks",
    "hash",
    "",
    "broker",
    "newest: the content of tasks.json, as JSON: epoch (of the newest teacher), teacher (digest of its token), tasks "
    "(the newest that a teacher published; version [0, 0] before the first)",
    example='newest {"epoch":2,"teacher":"9f2c...","tasks":{"version":[2,7],"tasks":[...],"group":0}}',
)
TASK_FIGURES = Key(
    "task_figures",
    "hash",
    "",
    "broker",
    f'field task, as published, for the {MOST_TASKS} newest, and "{OTHER_TASKS}" for all others together: JSON of '
    "episodes (finished) and env_failures, from which the next broker goes on, return_mean and len_mean (env steps) of "
    "the newest 100 of these episodes, and last_unix_s. A task of more than 120 characters is cut, with a digest",
    example='{"level":3} {"episodes":310,"env_failures":2,"return_mean":0.91,"len_mean":12.4,"last_unix_s":...}',
    when="each report",
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
HISTORY_5S, HISTORY_60S = (
    Key(
        *(f"history:{seconds}s", "stream", "as in gauges and totals", "broker", f"the newest {span}: {_HISTORY}"),
        example=f"{unix_ms}-0 env_steps_per_s 41230.5 env_steps_total 81920 ...",
        when=when,
    )
    for seconds, span, unix_ms, when in (
        (5, "hour", 1795280625000, "every 5 s"),
        (60, "24 hours", 1795280640000, "every minute"),
    )
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
    when="each second, and when a process starts or ends",
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

TABLE = tuple(key for key in tuple(globals().values()) if isinstance(key, Key))
"""All keys that stay: those above. `CHECK` does not."""

CHECK = Key(
    "check:{one}",
    "any",
    "",
    "supervisor",
    "written and deleted before a start, to see whether the fleet may use each command that it needs",
)

SESSIONS_REVOKED, GONE_KEY = "sessions_revoked", "removed"

QUANTILES = ("0.05", "0.25", "0.5", "0.75", "0.95")
ACCEPTED_LAG, CONSUMED_LAG = "accepted_lag_agent_steps_bucket", "consumed_lag_agent_steps_bucket"
LEARNER_TIME = "learner_time_share"
WORKER_RATE, MANY_WORKERS = "worker_env_steps_per_s_quantile", 17

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
