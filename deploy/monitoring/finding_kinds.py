"""The table of what may be wrong with a fleet. The docs show it, and every finding is made from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import orjson

from headrace.deploy.monitoring.facts import Facts

Severity = Literal["warning", "error"]


@dataclass(frozen=True, slots=True)
class FindingKind:
    """One thing that may be wrong: its stable name, what it means and what to do.

    - after_s: for how long it may last before it is a finding. Until then `headrace up` names it only while the fleet
      takes no step, and a fleet that starts is "Starting".
    - limit: the setting that decides what follows; "" for none.
    """

    name: str
    severity: Severity
    meaning: str
    after_s: float
    limit: str
    what_to_do: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong.

    - kind: the name of its `FindingKind`.
    - whom: the process or peer concerned.
    - since_unix_s: the start; None if it is unknown.
    - limit: the setting that decides what follows, with its value; "" for none.
    - command: the command to paste that helps; "" for none.
    """

    kind: str
    severity: Severity
    whom: str
    sentence: str
    since_unix_s: float | None = None
    limit: str = ""
    command: str = ""


@dataclass(frozen=True, slots=True)
class Observation:
    """A state that was seen, and whether it has lasted so long that it is wrong."""

    finding: Finding
    is_wrong: bool


KINDS = (
    FindingKind(
        "supervisor_gone",
        "error",
        "The supervisor has died, and the fleet with it.",
        0,
        "",
        "Go on with the run: `headrace up --resume RUN`.",
    ),
    FindingKind(
        "redis_away",
        "error",
        "Redis does not answer, or refuses. The fleet goes on; all numbers are old.",
        2,
        "redis.url",
        "Start Redis again, or free its memory. The supervisor restarts a Redis of the fleet's own.",
    ),
    FindingKind(
        "redis_garbage",
        "warning",
        "Redis has values under the fleet's keys that Headrace did not write.",
        0,
        "",
        "Find the program that writes them: `headrace redis keys FLEET` lists the keys.",
    ),
    FindingKind(
        "disk_full",
        "error",
        "The disk of the run directory has less than 64 MiB left. Processes that cannot write end.",
        0,
        "fleet.run_dir",
        "Free some room there.",
    ),
    FindingKind(
        "process_stopped",
        "error",
        "A signal (SIGSTOP, SIGTSTP) has stopped a process.",
        0,
        "broker.lease_s",
        "Continue it: `kill -CONT PID`. The supervisor replaces its own processes after this limit.",
    ),
    FindingKind(
        "process_restarting",
        "warning",
        "A process has ended, and its slot is empty until it starts again.",
        0,
        "supervisor.restart_backoff_max_s",
        "Read why it ended, in its log.",
    ),
    FindingKind(
        "crash_loop",
        "error",
        "A process ends again and again: three times or more within supervisor.restart_window_s.",
        0,
        "supervisor.max_restarts_per_window",
        "Read why it ends, in its log. Beyond this limit the fleet ends.",
    ),
    FindingKind(
        "process_failed",
        "error",
        "A process has failed for good and is not started again.",
        0,
        "supervisor.max_restarts_per_window",
        "Read why it ended, in its log.",
    ),
    FindingKind(
        "learner_fenced",
        "warning",
        "A newer learner has taken over from the fleet's own.",
        0,
        "broker.lease_s",
        "Nothing if that was meant. Otherwise stop the other learner: the fleet's own starts again after this limit.",
    ),
    FindingKind(
        "broker_silent",
        "error",
        "The broker lives and does nothing, or none reports to Redis.",
        5,
        "broker.lease_s",
        "Look at its log. The supervisor replaces a broker that is silent beyond this limit.",
    ),
    FindingKind(
        "learner_silent",
        "error",
        "The fleet's learner lives and gives no sign of life: one minibatch takes long, or it hangs.",
        30,
        "supervisor.hung_after_s",
        "Look at its log. The supervisor replaces it beyond this limit.",
    ),
    FindingKind(
        "env_host_silent",
        "error",
        "An env host lives and gives no sign of life.",
        5,
        "sampling.env_hosts_lease_s",
        "Look at its log. Its worker counts it as lost beyond this limit.",
    ),
    FindingKind(
        "env_hangs",
        "error",
        "An env or a callback in a worker's own process has not returned.",
        5,
        "broker.lease_s",
        "The worker is replaced beyond this limit. `sampling.env_placement=process` gives envs processes of their own.",
    ),
    FindingKind(
        "envs_silent",
        "error",
        "None of a worker's envs has answered, in their processes or on their hosts.",
        5,
        "sampling.env_step_timeout_s",
        "Look at the envs' processes or hosts. An env that is silent beyond this limit is killed and rebuilt.",
    ),
    FindingKind(
        "env_rebuilding",
        "warning",
        "A worker builds an env again, and that takes long.",
        15,
        "sampling.env_construct_timeout_s",
        "Look at the worker's log. Construction of an env in its own process ends beyond this limit.",
    ),
    FindingKind(
        "worker_loading",
        "warning",
        "A worker has started and not joined yet: imports and the start of its envs take long.",
        60,
        "worker.connect_timeout_s",
        "Look at the worker's log. It is replaced 10 s beyond this limit, but not before 60 s.",
    ),
    FindingKind(
        "worker_building",
        "warning",
        "A worker builds its envs, and that takes long.",
        60,
        "sampling.env_construct_timeout_s",
        "Look at the worker's log.",
    ),
    FindingKind(
        "no_env_hosts",
        "error",
        "No env host serves the envs of a worker.",
        10,
        "sampling.env_hosts_timeout_s",
        "Start env hosts with the command of the finding.",
    ),
    FindingKind(
        "worker_not_joined",
        "error",
        "A worker runs, and the broker does not know it.",
        10,
        "worker.connect_timeout_s",
        "Look at the worker's log: its key, its token or the network may be the reason.",
    ),
    FindingKind(
        "worker_lost",
        "warning",
        "The connection of a worker from elsewhere has ended without a word, and its slot is empty.",
        0,
        "broker.lease_s",
        "Start it again. The books of its last life stay open until then.",
    ),
    FindingKind(
        "worker_late",
        "warning",
        "A worker from elsewhere has sent no heartbeat for more than three intervals.",
        3,
        "broker.lease_s",
        "Look at its machine. It counts as lost beyond this limit.",
    ),
    FindingKind(
        "no_worker",
        "error",
        "The fleet has no worker.",
        10,
        "fleet.workers",
        "Start workers with the command of the finding.",
    ),
    FindingKind(
        "learner_loading",
        "warning",
        "The fleet's own learner has started and is not connected yet: imports take long, or it cannot connect.",
        60,
        "supervisor.hung_after_s",
        "Look at the learner's log.",
    ),
    FindingKind(
        "no_weights",
        "error",
        "Workers have no weights to act with, and wait for the first ones.",
        60,
        "worker.random_actions_before_weights",
        "Let the learner publish weights before its first batch, or look at its log.",
    ),
    FindingKind(
        "no_learner",
        "error",
        "No learner is connected, so batches are not committed and windows fill up.",
        10,
        "worker.window_batches",
        "Start a learner with the command of the finding.",
    ),
    FindingKind(
        "learner_slow",
        "warning",
        "All workers wait, with full windows, for a learner that is connected and has not committed.",
        10,
        "worker.window_batches",
        "A shorter update, or a larger window if steps may be older, lets workers go on meanwhile.",
    ),
    FindingKind(
        "no_commits",
        "error",
        "All workers wait for a learner that is connected and commits nothing: it hangs, or never commits.",
        60,
        "worker.window_batches",
        "Call `stream.commit()`, or leave out `auto_commit=False`, in a learner of your own.",
    ),
    FindingKind(
        "no_credit",
        "warning",
        "The broker holds as much as it may, and gives workers no credit.",
        10,
        "broker.max_held_bytes",
        "Let the learner commit, raise the limit of the finding, or choose broker.overflow.",
    ),
    FindingKind(
        "window_full",
        "warning",
        "A worker waits with a full window although the learner commits.",
        10,
        "worker.window_batches",
        "Look at the log of broker and learner: batches of this worker are not settled.",
    ),
    FindingKind(
        "round_waits",
        "warning",
        "Synchronous sampling: workers have shipped their share and wait for others, or for the learner.",
        30,
        "sampling.synchronous",
        "Look at the workers that are named. Their shares go to others once they are lost.",
    ),
    FindingKind(
        "no_clients",
        "warning",
        "Workers serve clients, and none takes steps.",
        30,
        "serving.enabled",
        "Connect clients to the addresses of the finding.",
    ),
    FindingKind(
        "envs_failing",
        "warning",
        "Envs of a worker fail again and again: three times or more, and lately.",
        0,
        "sampling.env_restart_attempts",
        "Read the newest failure. Beyond this limit of failures in a row the fleet ends.",
    ),
    FindingKind(
        "episodes_censored",
        "warning",
        "Aborted episodes differ from finished ones: they are a fifth longer, or earn half as much or half as much "
        "again in a step. The figures of finished episodes are then not those of all.",
        0,
        "",
        "Look at what aborts them: the failures of envs, with `headrace top` or on the live page.",
    ),
    FindingKind(
        "envs_down",
        "warning",
        "Some envs of a worker have failed and are not built again; the others go on.",
        20,
        "sampling.env_construct_timeout_s",
        "Read the newest failure, and why the env cannot be built.",
    ),
    FindingKind(
        "env_hosts_missing",
        "warning",
        "Some env hosts of a worker are gone; the envs of the others go on.",
        0,
        "sampling.env_hosts_lease_s",
        "Start as many env hosts as are missing with the command of the finding.",
    ),
    FindingKind(
        "batches_refused",
        "warning",
        "The broker has refused messages, or claims in them, again and again in the last minute.",
        0,
        "broker.max_batch_bytes",
        "Look at the broker's log: it names the peer and the reason.",
    ),
    FindingKind(
        "keys_revoked",
        "warning",
        "Sessions ended in the last two minutes because their key was revoked.",
        0,
        "keys.dir",
        "Nothing if that was meant. `headrace keys list` shows the keys.",
    ),
)
KIND = {kind.name: kind for kind in KINDS}


def observe(
    facts: Facts,
    kind: str,
    whom: str,
    sentence: str,
    for_s: float | None = None,
    *,
    command: str = "",
    limit: str = "",
) -> Observation:
    """Make an observation that has lasted for `for_s` seconds. None: the duration is unknown, and it counts as wrong.

    `limit`: the setting to name instead of the usual one of its kind.
    """
    known = KIND[kind]
    since = None if for_s is None else facts.unix_s - for_s
    finding = Finding(kind, known.severity, whom, sentence, since, _with_value(facts, limit or known.limit), command)
    return Observation(finding, for_s is None or for_s >= known.after_s)


def _with_value(facts: Facts, key: str) -> str:
    """Return a setting with its value, if that is known and is no secret."""
    config = facts.config
    if not key or config is None or key == "redis.url":
        return key
    section, _, name = key.partition(".")
    value = config.window_batches() if key == "worker.window_batches" else getattr(getattr(config, section), name)
    if value is None or value == "":
        return key
    return f"{key} = {value:g}" if isinstance(value, float) else f"{key} = {orjson.dumps(value).decode()}"
