"""The table of what may be wrong with a fleet. Every finding is made from it.

docs/guides/why.md says what each kind means, and what to do. A test compares the two tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import orjson

from headrace.deploy.monitoring.facts import Facts
from headrace.schemas.basics.printable import one_line

Severity = Literal["warning", "error"]


@dataclass(frozen=True, slots=True)
class FindingKind:
    """One thing that may be wrong, by its stable name.

    - after_s: for how long it may last before it is a finding. Until then `headrace up` names it only while the fleet
      takes no step, and a fleet that starts is "Starting".
    - limit: the setting that decides what follows; "" for none.
    """

    name: str
    severity: Severity
    after_s: float
    limit: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong.

    - kind: the name of its `FindingKind`.
    - whom: the process or peer concerned.
    - since_unix_s: the start; None if it is unknown.
    - limit: the setting that decides what follows, with its value; "" for none.
    - command: the command to paste that helps; "" for none.
    - slots: those of all workers concerned, where one cause is found in several.
    """

    kind: str
    severity: Severity
    whom: str
    sentence: str
    since_unix_s: float | None = None
    limit: str = ""
    command: str = ""
    slots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Observation:
    """A state that was seen, and whether it has lasted so long that it is wrong."""

    finding: Finding
    is_wrong: bool


KINDS = (
    FindingKind("supervisor_gone", "error", 0, ""),
    FindingKind("redis_away", "error", 2, "redis.url"),
    FindingKind("redis_garbage", "warning", 0, ""),
    FindingKind("disk_full", "error", 0, "fleet.run_dir"),
    FindingKind("process_stopped", "error", 0, "broker.lease_s"),
    FindingKind("process_restarting", "warning", 0, "supervisor.restart_attempts"),
    FindingKind("crash_loop", "error", 0, "supervisor.restart_attempts"),
    FindingKind("process_failed", "error", 0, "supervisor.restart_attempts"),
    FindingKind("learner_fenced", "warning", 0, "broker.lease_s"),
    FindingKind("broker_silent", "error", 5, "broker.lease_s"),
    FindingKind("joins_blocked", "error", 0, ""),
    FindingKind("learner_silent", "error", 30, "supervisor.hung_after_s"),
    FindingKind("env_host_silent", "error", 5, "broker.lease_s"),
    FindingKind("env_hangs", "error", 5, "broker.lease_s"),
    FindingKind("envs_silent", "error", 5, "sampling.env_step_timeout_s"),
    FindingKind("env_rebuilding", "warning", 15, "sampling.env_reset_timeout_s"),
    FindingKind("worker_loading", "warning", 60, "worker.connect_timeout_s"),
    FindingKind("worker_building", "warning", 60, "sampling.env_reset_timeout_s"),
    FindingKind("no_env_hosts", "error", 10, "sampling.env_placement"),
    FindingKind("worker_not_joined", "error", 10, "worker.connect_timeout_s"),
    FindingKind("worker_lost", "warning", 0, "broker.lease_s"),
    FindingKind("worker_late", "warning", 3, "broker.lease_s"),
    FindingKind("no_worker", "error", 10, "fleet.workers"),
    FindingKind("learner_loading", "warning", 60, "supervisor.hung_after_s"),
    FindingKind("no_weights", "error", 60, "worker.random_actions_before_weights"),
    FindingKind("no_learner", "error", 10, "worker.window_batches"),
    FindingKind("learner_threads", "warning", 0, ""),
    FindingKind("learner_slow", "warning", 10, "worker.window_batches"),
    FindingKind("metric_not_finite", "error", 0, ""),
    FindingKind("no_commits", "error", 60, "worker.window_batches"),
    FindingKind("no_group_reader", "error", 10, ""),
    FindingKind("group_slow", "warning", 10, ""),
    FindingKind("group_loses", "warning", 0, "broker.max_held_bytes"),
    FindingKind("no_credit", "warning", 10, "broker.max_held_bytes"),
    FindingKind("window_full", "warning", 10, "worker.window_batches"),
    FindingKind("round_waits", "warning", 30, "sampling.synchronous"),
    FindingKind("no_clients", "warning", 30, "serving.enabled"),
    FindingKind("envs_failing", "warning", 0, "sampling.env_restart_attempts"),
    FindingKind("tasks_refused", "warning", 0, ""),
    FindingKind("episodes_censored", "warning", 0, ""),
    FindingKind("envs_down", "warning", 20, "sampling.env_reset_timeout_s"),
    FindingKind("env_hosts_missing", "warning", 0, "broker.lease_s"),
    FindingKind("batches_oversize", "error", 0, "broker.max_batch_bytes"),
    FindingKind("batches_refused", "warning", 0, ""),
)
KIND = {kind.name: kind for kind in KINDS}
_COUNTED = {
    "sampling.env_restart_attempts": " failures of one env in a row",
    "supervisor.restart_attempts": " restarts of one process",
}
"""The events that each limit counts, of one env or process. The sentence of a finding counts all envs or processes."""


def observe(
    facts: Facts,
    kind: str,
    whom: str,
    sentence: str,
    for_s: float | None = None,
    *,
    command: str = "",
    limit: str = "",
    slots: tuple[int, ...] = (),
) -> Observation:
    """Make an observation that has lasted for `for_s` seconds. None: the duration is unknown, and it counts as wrong.

    `limit`: the setting to name instead of the usual one of its kind.
    """
    known = KIND[kind]
    since = None if for_s is None else facts.unix_s - for_s
    finding = Finding(
        kind, known.severity, whom, sentence, since, with_value(facts, limit or known.limit), command, slots
    )
    return Observation(finding, for_s is None or for_s >= known.after_s)


def with_value(facts: Facts, key: str) -> str:
    """Return a setting with its value, if that is known and is no secret."""
    value = None if key in ("", "redis.url") else facts.setting(key)
    if value is None or value == "":
        return key
    shown = f"{value:g}" if isinstance(value, float) else one_line(orjson.dumps(value).decode())
    return f"{key} = {shown}{_COUNTED.get(key, '')}"
