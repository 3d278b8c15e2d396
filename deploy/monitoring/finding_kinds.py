"""The table of what may be wrong with a fleet. Every finding is made from it.

docs/guides/why.md says what each kind means, and what to do. A test compares the two tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import orjson

from headrace.deploy.monitoring.facts import Facts
from headrace.schemas.basics.printable import one_line

Severity = Literal["info", "warning", "error"]
"""An "info" is no finding: nothing is wrong."""


@dataclass(frozen=True, slots=True)
class FindingKind:
    """One thing that may be wrong, by its stable name.

    - after_s: for how long it may last before it is a finding. Until then `headrace up` names it only while the fleet
      takes no step, and a fleet that starts is "Starting".
    - limit: the setting that decides what follows; "" for none.
    - remedy: what to do where no command helps.
    """

    name: str
    severity: Severity
    after_s: float
    limit: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong.

    - kind: the name of its `FindingKind`.
    - whom: the process or peer concerned.
    - since_unix_s: the start; None if it is unknown.
    - limit: the setting that decides what follows, with its value; "" for none.
    - command: the command to paste that helps; "" for none.
    - slots: those of all workers concerned, where one cause is found in several.
    - remedy: that of its `FindingKind`.
    """

    kind: str
    severity: Severity
    whom: str
    sentence: str
    since_unix_s: float | None = None
    limit: str = ""
    command: str = ""
    slots: tuple[int, ...] = ()
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Observation:
    """A state that was seen, and whether it has lasted so long that it is wrong."""

    finding: Finding
    is_wrong: bool


KINDS = (
    FindingKind("supervisor_gone", "error", 0, "", "headrace up --resume RUN"),
    FindingKind("redis_away", "error", 2, "redis.url", "Start Redis, free its memory, or make it a primary."),
    FindingKind("redis_garbage", "warning", 0, "", "Find it: redis-cli --scan lists the keys."),
    FindingKind("disk_full", "error", 0, "fleet.run_dir", "Free some room."),
    FindingKind("process_stopped", "error", 0, "broker.lease_s", "kill -CONT PID"),
    FindingKind("process_restarting", "warning", 0, "supervisor.restart_attempts", "Read its log."),
    FindingKind("crash_loop", "error", 0, "supervisor.restart_attempts", "Read its log."),
    FindingKind("process_failed", "error", 0, "supervisor.restart_attempts", "Read its log."),
    FindingKind("learner_fenced", "warning", 0, "broker.lease_s", "If not meant, stop the other."),
    FindingKind("broker_silent", "error", 5, "broker.lease_s", "Read its log."),
    FindingKind("joins_blocked", "error", 0, "", "prlimit --pid PID --nofile=65536, or free the disk."),
    FindingKind("learner_silent", "error", 30, "supervisor.hung_after_s", "Read its log."),
    FindingKind("env_host_silent", "error", 5, "broker.lease_s", "Read its log."),
    FindingKind("env_hangs", "error", 5, "broker.lease_s", "sampling.env_placement=process ends such an env alone."),
    FindingKind("envs_silent", "error", 5, "sampling.env_step_timeout_s", "Look at their processes or hosts."),
    FindingKind("env_rebuilding", "warning", 15, "sampling.env_reset_timeout_s", "Read its log."),
    FindingKind("worker_loading", "warning", 60, "worker.connect_timeout_s", "Read its log."),
    FindingKind("worker_building", "warning", 60, "sampling.env_reset_timeout_s", "Read its log."),
    FindingKind("no_env_hosts", "error", 10, "sampling.env_placement", "Start env hosts."),
    FindingKind("worker_not_joined", "error", 10, "worker.connect_timeout_s", "Check its key and the network."),
    FindingKind("worker_lost", "warning", 0, "broker.lease_s", "Start it again; its books stay open until then."),
    FindingKind("worker_late", "warning", 3, "broker.lease_s", "Look at its machine and network."),
    FindingKind("no_worker", "error", 10, "fleet.workers", "Start workers."),
    FindingKind("learner_loading", "warning", 60, "supervisor.hung_after_s", "Read its log."),
    FindingKind("no_weights", "error", 60, "worker.random_actions_before_weights", "Publish before the first batch."),
    FindingKind("no_learner", "error", 10, "worker.window_batches", "Start it again."),
    FindingKind("learner_threads", "warning", 0, "", "torch.set_num_threads(1), or learner.torch_threads"),
    FindingKind("learner_slow", "warning", 10, "worker.window_batches", "Make updates shorter, or the window larger."),
    FindingKind("metric_not_finite", "error", 0, "", "Resume with a lower learning rate, or clip gradients."),
    FindingKind("no_commits", "error", 60, "worker.window_batches", "stream.commit(), or no auto_commit=False"),
    FindingKind("no_group_reader", "error", 10, "", "Start its reader, or let the group drop."),
    FindingKind("group_slow", "warning", 10, "", "Make it quicker, or let the group drop."),
    FindingKind("group_loses", "warning", 0, "broker.max_held_bytes", "Start its reader, or remove the group."),
    FindingKind("no_credit", "warning", 10, "broker.max_held_bytes", "Raise the limit, or choose broker.overflow."),
    FindingKind("window_full", "warning", 10, "worker.window_batches", "Commit, or enlarge the window."),
    FindingKind("round_waits", "warning", 30, "sampling.synchronous", "Look at the workers named."),
    FindingKind("no_clients", "warning", 30, "serving.enabled", "Connect clients."),
    FindingKind("envs_failing", "warning", 0, "sampling.env_restart_attempts", "headrace rerun RUN, or its log."),
    FindingKind("bounds_left", "warning", 0, "", "Correct the space, or clip observations."),
    FindingKind("tasks_refused", "warning", 0, "", "Correct the env or the task."),
    FindingKind("episodes_aborted", "warning", 0, "", "Repair what aborts them."),
    FindingKind("episodes_censored", "warning", 0, "", "Look at what aborts them."),
    FindingKind("envs_down", "warning", 20, "sampling.env_reset_timeout_s", "Read the newest failure."),
    FindingKind("env_hosts_missing", "warning", 0, "broker.lease_s", "Start as many again."),
    FindingKind("batches_oversize", "error", 0, "broker.max_batch_bytes", "Lower sampling.rollout_fragment_length."),
    FindingKind("batches_refused", "warning", 0, "", "Its log says why."),
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
    limit = with_value(facts, limit or known.limit)
    finding = Finding(kind, known.severity, whom, sentence, since, limit, command, slots, known.remedy)
    return Observation(finding, for_s is None or for_s >= known.after_s)


def with_value(facts: Facts, key: str) -> str:
    """Return a setting with its value, if that is known and is no secret."""
    value = None if key in ("", "redis.url") else facts.setting(key)
    if value is None or value == "":
        return key
    shown = f"{value:g}" if isinstance(value, float) else one_line(orjson.dumps(value).decode())
    return f"{key} = {shown}{_COUNTED.get(key, '')}"
