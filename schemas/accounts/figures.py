"""Every figure of a fleet and its workers: name, unit, meaning, and where people see it.

Redis, `/metrics`, the rows of a run and the reference have all of them. Page, `top` and report read here which of them
they show, and under which words. Counters have their rows in `ledger.py` and `lifetime_counters.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.schemas.accounts.redis_keys import (
    ACCEPTED_LAG,
    CONSUMED_LAG,
    LEARNER_TIME,
    MANY_WORKERS,
    QUANTILES,
    SESSIONS_REVOKED,
    WORKER_RATE,
)
from headrace.schemas.accounts.worker_figures import BLOCKED_BY, TIME_PARTS

LEARNER_PARTS = ("wait", "decode", "train", "publish")
"""The parts of a learner's time (`learner_stub/link/time_spent.py`)."""
_OWN = "of the broker's and the learner's own process; absent where the system does not tell"
_VALUES = {"quantile": QUANTILES, "role": ("broker", "learner")}


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure. With a `label` it has a field for each value of that (see `labelled`).

    - counts: True for a gauge that counts since the broker started, and so only grows. Prometheus gets it as a counter.
    - values: those of its label that are known, unless each figure with such a label has the same.
    - column: its column in the rows of a run, by default its name without the ending.
    - shown: the heading of its tile on the page and in `top`, or of its column in the table of workers; "" if they do
      not show it. "Heading: text; note; note": text, by default the figure, and notes of a tile have the names of
      figures in braces. A note is left out while one of its figures is unknown.
    - chart: the chart of page and report that draws it: "Heading, unit: name of the curve".
    - of, add: a figure over all workers: the member of their rows, and how to add the members up.
    """

    name: str
    unit: str
    meaning: str
    label: str = ""
    counts: bool = False
    values: tuple[str, ...] = ()
    column: str = ""
    shown: str = ""
    chart: str = ""
    of: str = ""
    add: Callable[[Iterable[float]], float] = sum

    def known_values(self) -> tuple[str, ...]:
        """Return the values of its label that are known."""
        return self.values or _VALUES.get(self.label, ())

    def column_for(self, value: str = "") -> str:
        """Return its column in the rows of a run, for one value of its label."""
        bare = self.column or self.name.removesuffix("_total").removesuffix("_quantile")
        if self.label in ("quantile", "le"):
            return f"{bare.removesuffix('_agent_steps_bucket')}_p{round(100 * float(value))}"
        return f"{bare}/{value}" if value else bare


RESTARTS = Metric(
    *("restarts_total", "restarts", "of processes by the supervisor", "role"),
    shown="Restarts: {restarts}; {restarts_by_role}",
)

GAUGE_TABLE = (
    Metric("unix_s", "s", "time of these values, by the broker's clock"),
    Metric(
        *("env_steps_per_s", "env steps/s", "in accepted batches, over the last seconds"),
        shown="Env steps/s",
        chart="Throughput, steps/s: env steps taken",
    ),
    Metric(
        *("episode_return_mean", "return", "of the last `episodes_window` finished episodes"),
        shown="Mean return; {episode_return_min} to {episode_return_max}; of the newest {episodes_window}; {left_out}",
        chart="Return of episodes: mean",
    ),
    Metric("episode_return_min", "return", "of those episodes"),
    Metric("episode_return_max", "return", "of those episodes"),
    Metric("episode_len_mean", "env steps", "of those episodes", chart="Length of episodes, env steps: mean"),
    Metric("episode_len_min", "env steps", "of those episodes"),
    Metric("episode_len_max", "env steps", "of those episodes"),
    Metric(
        *("episode_return_quantile", "return", "of those episodes, linear between two of them", "quantile"),
        chart="Return of episodes",
    ),
    Metric(
        *("episode_len_quantile", "env steps", "of those episodes, linear between two of them", "quantile"),
        chart="Length of episodes, env steps",
    ),
    Metric("episodes_window", "episodes", "that these are taken over, at most 100"),
    Metric(
        "episodes_window_aborted",
        "episodes",
        "that were aborted while these finished, and are in none of these figures. A killed worker counts with one for "
        "each of its envs, a worker that leaves in order with none",
    ),
    Metric(
        *("weights_seq", "version", "seq of the newest published weights"),
        shown="Weights: {weights_seq}; of learner epoch {learner_epoch}; slowest worker is behind by {weights_lag}",
    ),
    Metric("learner_epoch", "epoch", "of the learner that holds the lease"),
    Metric(
        *("messages_refused", "messages", "of peers, or claims in them, refused since the broker started"),
        counts=True,
        chart="Failures: messages refused since the broker started",
    ),
    Metric(
        *("held_batches", "batches", "accepted and neither committed nor dropped"),
        shown="Queued batches; {held_bytes}; oldest {oldest_unsettled_age_s}",
        chart="Queue, batches: held by the broker",
    ),
    Metric("held_bytes", "bytes", "of those of these batches that the broker has in memory"),
    Metric("held_agent_steps", "agent steps", "in these batches"),
    Metric(
        ACCEPTED_LAG,
        "agent steps",
        "accepted since the broker started in batches whose weights were at most `le` versions behind the newest at "
        "that moment, by the newest weights in the batch; those of an earlier learner are behind all versions of the "
        "present one",
        "le",
        chart="Lag of weights, versions: as accepted",
    ),
    Metric(
        CONSUMED_LAG,
        "agent steps",
        "given to the learner's user since the broker started, of weights at most `le` versions behind the newest at "
        "that moment, each step by its own weights",
        "le",
        chart="Lag of weights, versions: as consumed",
    ),
    Metric(
        LEARNER_TIME,
        "1",
        "share of the learner's time by part: wait (for data), decode, train (with commits and checkpoints), publish; "
        "over 10 s or more before its last commit; absent without a learner",
        "part",
        values=LEARNER_PARTS,
        column="learner_time",
        chart="Time of the learner, %",
    ),
    Metric("process_cpu_share", "1", f"{_OWN}: processor seconds per second", "role", chart="Processor time, cores"),
    Metric("process_rss_bytes", "bytes", f"{_OWN}: memory that it has", "role", chart="Memory, bytes"),
    Metric(
        *("oldest_unsettled_age_s", "s", "since the oldest held batch was accepted"),
        chart="Age of the oldest batch, s: since the broker accepted it",
    ),
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
    Metric("group_readers", "readers", "connected of this consumer group: 1 or 0", "group"),
    Metric("group_lag_agent_steps", "agent steps", "accepted, and not settled by this group", "group"),
    Metric("group_oldest_age_s", "s", "since the oldest of these was accepted", "group"),
    Metric("group_committed_agent_steps", "agent steps", "that this group has committed in all", "group", counts=True),
    Metric(
        *(
            "group_lost_agent_steps",
            "agent steps",
            "that it was to get and did not, in all; those before it do not count",
        ),
        "group",
        counts=True,
    ),
    Metric("redis_failures", "attempts", "to reach Redis that failed since the broker started", counts=True),
    Metric(
        *("aborted_return_mean", "return", "of the last `aborted_window` aborted episodes; absent before the first"),
        chart="Return of episodes: aborted ones",
    ),
    Metric("aborted_len_mean", "env steps", "of those episodes", chart="Length of episodes, env steps: aborted ones"),
    Metric(
        "aborted_window",
        "episodes",
        "that were given up before their end because an env failed, a client was lost, or a worker left; at most 100. "
        "Those that a killed worker left open do not count. Where they are longer or shorter than finished ones, the "
        "learner's data is censored",
    ),
    Metric(
        *("workers", "workers", "connected"),
        shown="Workers: {workers_connected}; {workers_wanted} wanted; {workers_blocked_now} blocked",
        chart="Workers: connected",
    ),
    Metric(
        "compression_ratio", "1", "of the arrays in these workers' batches to their messages, in bytes; absent at first"
    ),
    Metric(
        *("workers_blocked", "workers", "that wait, by what they wait for", "reason"),
        values=(*BLOCKED_BY, "other"),
        chart="Workers: that wait for",
    ),
    Metric(
        *("window_batches", "batches", "that workers keep, since they are not settled; some are on their way"),
        chart="Queue, batches: kept by workers",
    ),
    Metric("window_bytes", "bytes", "of those of these batches that workers have in memory"),
    Metric(
        WORKER_RATE,
        "env steps/s",
        f"of single workers, linear between two of them; absent for fewer than {MANY_WORKERS} workers",
        "quantile",
        chart="Steps of single workers, env steps/s",
    ),
    Metric(
        *("worker_time_share", "1", "of the workers' recent time, on average; the parts sum to 1", "part"),
        values=TIME_PARTS,
        column="worker_time",
        chart="Time of workers, %",
    ),
    Metric("clients", "sessions", "of clients at all policy servers; absent without one", chart="Clients: connected"),
    Metric("client_requests_per_s", "requests/s", "of clients, in recent seconds", chart="Requests, 1/s: of clients"),
    Metric(
        *("client_latency_s", "s", "from a step's arrival to its answer, averaged over busy servers", "quantile"),
        values=("0.5", "0.95"),
        chart="Latency for clients, s",
    ),
)

WORKER_TABLE = (
    Metric("unix_s", "s", "time of these values, by the broker's clock"),
    Metric("incarnation", "", "of the worker"),
    Metric("joined_unix_s", "s", "time at which it joined this broker"),
    Metric("weights_epoch", "epoch", "of the learner whose weights it uses"),
    Metric("weights_seq", "version", "of these weights"),
    Metric("blocked", "", "window, round or group where it waits for that before it samples on, else empty"),
    Metric("blocked_since_unix_s", "s", "since when; absent where it does not wait"),
    Metric("env_steps", "env steps", "of this life, as of its last accepted batch"),
    Metric("env_steps_per_s", "env steps/s", "in accepted batches, over the last seconds", shown="Steps/s"),
    Metric(
        *("weights_behind", "versions", "that these are older than the newest; -1 for an earlier learner's"),
        shown="Lag",
    ),
    Metric("episodes", "episodes", "finished in this life"),
    Metric("array_bytes", "bytes", "of the arrays in its batches of this life; absent before the first heartbeat"),
    Metric("sent_bytes", "bytes", "of these batches as messages, which compression makes smaller"),
    Metric("window_batches", "batches", "that it keeps, since they are not settled; absent before the first heartbeat"),
    Metric("window_bytes", "bytes", "of those of these batches that it has in memory"),
    Metric("accepted", "batch", "number of the last accepted batch"),
    Metric("settled", "batch", "number up to which its batches are committed or dropped"),
    Metric(
        "cpu_share", "1", "processor seconds of its process per second; absent before the first heartbeat", shown="CPU"
    ),
    Metric("rss_bytes", "bytes", "of memory that its process has, without processes of envs", shown="Memory"),
    Metric("held_batches", "batches", "accepted and neither committed nor dropped", shown="Held"),
    Metric("host", "", "on which it runs", shown="Host"),
    Metric("pid", "", "of its process there", shown="pid"),
    Metric("headrace_version", "", "of Headrace, there; empty where the worker does not tell it"),
    Metric(
        *("envs_cpu_share", "1", "processor seconds per second of processes or hosts of its envs; absent without"),
        shown="CPU of envs",
    ),
    Metric(
        *("envs_rss_bytes", "bytes", "of memory that these have together; what they share counts in each"),
        shown="Memory of envs",
    ),
    Metric("num_envs", "envs", "that step together"),
    Metric("envs_lost", "envs", "of these that are down: they wait to be rebuilt, or for a host"),
    Metric("env_silence_s", "s", "for which none of its envs has answered, while it waits for one"),
    Metric("env_call", "", "that has been in progress longest, in words; empty while its envs answer"),
    Metric("env_failures", "failures", "of its envs in this life; absent without any, as the next two"),
    Metric("env_failure", "", "the newest of these in words"),
    Metric("env_failure_age_s", "s", "since the broker heard of it"),
    Metric("tasks_refused", "", "what its envs refuse of the present tasks, and why, in words; absent without"),
    Metric("time_share", "1", "of its recent time by part, which sum to 1; absent for the first seconds"),
    Metric(
        "env_hosts",
        "hosts",
        "connected, wanted so that all envs have a place, and versions of Headrace that they tell; absent without them",
    ),
    Metric("serving", "", "clients, requests_per_s, latency_p50_s and latency_p95_s; absent without a policy server"),
)
"""Members of the JSON of a worker in `workers`."""

SLOT_TABLE = (
    Metric("slot", "", "of the worker", shown="Worker"),
    Metric("status", "", "of its process, and what it does or waits for", shown="State"),
    Metric("env_steps_all", "env steps", "of all lives in the slot", shown="Env steps"),
    Metric("lost", "agent steps", "of these lives that will not reach the learner", shown="Lost"),
    Metric("env_failures_all", "failures", "of envs in these lives", shown="Failures"),
    Metric("restarts", "restarts", "of its process by the supervisor", shown="Restarts"),
    Metric("episodes_all", "episodes", "finished in these lives", shown="Episodes"),
)
"""Figures of a slot that books and supervisor tell. Redis does not have these figures under `workers`."""


FLEET_TABLE = (
    Metric(
        *("weights_lag", "versions", "by which the worker furthest behind is behind the newest weights"),
        of="weights_behind",
        add=lambda told: max(0, *told),
        chart="Lag of weights, versions: worker furthest behind",
    ),
    Metric("envs", "envs", "of all connected workers", of="num_envs"),
    Metric("envs_lost", "envs", "of these that are down. They wait to be rebuilt, or for a host", of="envs_lost"),
    Metric("workers_cpu_share", "1", "processor seconds per second of all connected workers", of="cpu_share"),
    Metric(
        "workers_rss_bytes", "bytes", "of memory that these workers have, without processes of envs", of="rss_bytes"
    ),
    Metric("envs_cpu_share", "1", "processor seconds per second of processes and hosts of envs", of="envs_cpu_share"),
    Metric("envs_rss_bytes", "bytes", "of memory that these have. What they share counts in each", of="envs_rss_bytes"),
    Metric("env_hosts_connected", "hosts", "of envs that are connected to workers", of="env_hosts.connected"),
    Metric(
        "env_hosts_wanted", "hosts", "that workers want, so that all their envs have a place", of="env_hosts.wanted"
    ),
)
"""Figures of the fleet that Redis does not have: the rows of its workers add up to them."""


def added_up(workers: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the figures of `FLEET_TABLE`. One is absent if no worker tells its member."""
    rows, sums = list(workers), dict[str, float]()
    for figure in FLEET_TABLE:
        told = [member for row in rows if (member := _member(row, figure.of)) is not None]
        if told:
            sums[figure.name] = figure.add(told)
    return sums


def _member(row: Any, path: str) -> float | None:
    for name in path.split("."):
        if name not in row:
            return None
        row = row[name]
    return row  # type: ignore[no-any-return]
