"""Metrics of fleets in the text formats of Prometheus and OpenMetrics, for `headrace exporter` and the dashboard.

Names, meanings and units of counters and gauges are those of `schemas/accounts/figures.py`: a metric that is added
there appears here. `exposed_name` makes them names as Prometheus wants them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import generate_latest
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, choose_encoder

from headrace.deploy.annexes.watch.state.fleet_state import workers_wanted
from headrace.deploy.monitoring.facts import Facts, ProcessState
from headrace.deploy.monitoring.finding_kinds import KINDS
from headrace.deploy.monitoring.findings import find
from headrace.deploy.monitoring.processes import GONE, STOPPED, SUPERVISOR
from headrace.deploy.run.redis_view import Snapshot
from headrace.schemas.accounts.figures import FLEET_TABLE, GAUGE_TABLE, RESTARTS, Metric, added_up
from headrace.schemas.accounts.lifetime_counters import COUNTER_TABLE
from headrace.schemas.accounts.redis_keys import labelled, unlabelled

PREFIX = "headrace_"
_SPELT = (("_unix_s", "_timestamp_seconds"), ("_per_s", "_per_second"), ("_s", "_seconds"))
_QUANTILE = "_quantile"
_UNITS = ("seconds", "bytes")
_UNITS_IN_WORDS = {"s": "seconds", "1": "share"}
_BUCKET = "le"
_LABELS = {"quantile": "q"}
"""Labels with another name here. OpenMetrics keeps `quantile` for summaries, whose values may not be negative, as
returns may be.
"""

_ZEROS = {metric.name: 0 for metric in COUNTER_TABLE if not metric.label} | {
    labelled(metric.name, metric.label, value): 0 for metric in COUNTER_TABLE for value in metric.known_values()
}
"""Counters that Redis does not have yet are 0, so that their first steps count as an increase. If Redis has none, the
fleet is new, or Redis lost them: zeros would look like a counter reset.
"""

_UP = ("up", "1 if Redis told of this fleet at this scrape, else 0 and only its run directory tells of it")
_BROKER_UP = ("broker_up", "1 while a broker of this fleet reports to Redis")
_ENDED = ("ended", "1 once this fleet has ended in order, and until it is started again")
_OF_LEASE = {
    "connected": ("learner_connected", "1 while the learner that holds the lease is connected"),
    "since_unix_s": ("learner_lease_timestamp_seconds", "seconds: unix time since which the broker knows it"),
    "committed_unix_s": ("learner_committed_timestamp_seconds", "seconds: unix time of the learner's last commit"),
}
_QUEUED = ("queued_agent_steps", "agent steps: taken and neither committed nor dropped nor discarded")
_WORKERS_WANTED = ("workers_wanted", "workers: that configuration or `headrace scale` ask for, here and on Ray")
_DISK_FREE = ("disk_free_bytes", "bytes: free on the disk of the run directory")
_POLICY = ("policy_return", "return: of the newest agents that this policy played. statistic is mean, min or max")
_POLICY_LENGTH = ("policy_len", "agent steps: of the same agents' episodes. statistic is as of policy_return")
_POLICY_AGENTS = ("policy_agents", "agents: that policy_return and policy_len are taken over")
_OF_TASK = {
    "return_mean": ("task_return", "return: mean of the newest episodes with this task, at most 100"),
    "len_mean": ("task_len", "env steps: mean length of the same episodes"),
    "episodes": ("task_episodes", "episodes: finished with this task"),
    "env_failures": ("task_env_failures", "failures: of envs that had this task"),
}
"""Tasks that are summed up as "other tasks" lose their own samples. One that comes again begins at 0."""
_FINDINGS = ("findings", "problems: of each kind that `headrace why` names now")
_LOGGED = ("callback_metric", "as logged: what callbacks logged under this name, over all workers")
_LEARNER_FIGURE = ("learner_figure", "as logged: what the learner logged under this name in its newest row")
_PROCESS_RUNNING = ("process_running", "1 while the process runs, as its supervisor sees it")
_PROCESS_MEMORY = ("process_resident_memory_bytes", "bytes: of memory that the process has")


def metrics_text(fleets: Mapping[str, Facts | None], accept: str = "") -> tuple[bytes, str]:
    """Return all metrics of these fleets, by their names, and the content type. Reads nothing.

    A fleet is None if its facts could not be read. `accept` is the request's Accept header. It chooses between the text
    formats of Prometheus and OpenMetrics.
    """
    families = _Families()
    for fleet_id, facts in fleets.items():
        _add_fleet(families, facts, {"fleet": fleet_id})
    try:
        encode, content_type = choose_encoder(accept)
    except (TypeError, ValueError):  # the Accept header has a malformed version
        encode, content_type = generate_latest, CONTENT_TYPE_PLAIN_0_0_4
    return encode(families), content_type


def exposed_name(name: str) -> str:
    """Return the name that Prometheus gets for a name of the contract: with its prefix, and units spelt in full."""
    if name == "unix_s":
        name = "reported_unix_s"
    bare = name.removesuffix(_QUANTILE)
    for ending, spelt in _SPELT:
        if bare.endswith(ending):
            return PREFIX + bare.removesuffix(ending) + spelt + name.removeprefix(bare)
    return PREFIX + name


@dataclass(slots=True)
class _Families:
    """Families of metrics by name: all samples of a name stand together in the text."""

    by_name: dict[str, Family] = field(default_factory=dict)

    def add(
        self, name: str, meaning: str, value: float, labels: Mapping[str, str], kind: str = "gauge", suffix: str = ""
    ) -> None:
        """Add a sample. `name` has its prefix; `suffix` comes behind it in the sample alone."""
        family = self.by_name.get(name)
        if family is None:
            unit = next((unit for unit in _UNITS if name.endswith(f"_{unit}")), "")
            sentence = f"{meaning[:1].upper()}{meaning[1:]}."
            family = self.by_name[name] = Family(name, sentence, kind, unit)
        family.add_sample(name + suffix, dict(labels), float(value))

    def collect(self) -> Iterator[Family]:
        """Yield the families. The encoders of `prometheus_client` call this method."""
        yield from self.by_name.values()


def _add_fleet(families: _Families, facts: Facts | None, labels: Mapping[str, str]) -> None:
    is_known = facts is not None and not facts.is_old
    _add_own(families, _UP, facts is not None and not facts.redis_error, labels)
    if facts is None:
        return
    if not is_known:
        _add_without_redis(families, facts.processes.get(SUPERVISOR), labels)
        return
    snapshot = facts.snapshot
    _add_own(families, _BROKER_UP, "unix_s" in snapshot.gauges, labels)
    _add_own(families, _ENDED, _has_ended(facts), labels)
    _add_counters(families, {**_ZEROS, **snapshot.totals} if snapshot.totals else {}, labels)
    _add_counters(families, snapshot.supervisor_totals, labels)
    _add_gauges(families, {**snapshot.gauges, **added_up(snapshot.workers.values())}, labels)
    _add_derived(families, snapshot, labels)
    if facts.learner_row is not None and "unix_s" in snapshot.gauges:
        for name, figure in sorted(facts.learner_row.values.items()):
            _add_own(families, _LEARNER_FIGURE, figure, {**labels, "name": name})
    if (wanted := workers_wanted(facts)) is not None:
        _add_own(families, _WORKERS_WANTED, wanted, labels)
    if facts.disk_free_bytes is not None:
        _add_own(families, _DISK_FREE, facts.disk_free_bytes, labels)
    for process in facts.processes.values():
        _add_process(families, process, labels)
    counts = Counter(finding.kind for finding in find(facts))
    for kind in KINDS:
        _add_own(families, _FINDINGS, counts[kind.name], {**labels, "kind": kind.name, "severity": kind.severity})


def _add_without_redis(families: _Families, supervisor: ProcessState | None, labels: Mapping[str, str]) -> None:
    """Add what the run directory tells: a fleet's own Redis ends with the fleet, and with a killed supervisor."""
    if supervisor is not None and supervisor.state in (STOPPED, GONE):
        _add_own(families, _BROKER_UP, 0, labels)
        _add_own(families, _ENDED, supervisor.state == STOPPED, labels)


def _add_own(families: _Families, metric: tuple[str, str], value: float, labels: Mapping[str, str]) -> None:
    families.add(PREFIX + metric[0], metric[1], value, labels)


def _has_ended(facts: Facts) -> bool:
    supervisor = facts.processes.get(SUPERVISOR)
    return facts.snapshot.ended_unix_s is not None or (supervisor is not None and supervisor.state == STOPPED)


def _add_counters(families: _Families, totals: Mapping[str, int], labels: Mapping[str, str]) -> None:
    for metric, label, value in _of_table((*COUNTER_TABLE, RESTARTS), totals):
        name = exposed_name(metric.name.removesuffix("_total"))
        families.add(name, _meaning(metric), value, {**labels, **label}, "counter", "_total")


def _add_gauges(families: _Families, gauges: Mapping[str, float], labels: Mapping[str, str]) -> None:
    for metric, label, value in _of_table((*GAUGE_TABLE, *FLEET_TABLE), gauges):
        kind, suffix = "gauge", ""
        if metric.label == _BUCKET:
            kind, suffix = "histogram", "_bucket"
        elif metric.counts:
            kind, suffix = "counter", "_total"
        own = {_LABELS.get(name, name): text for name, text in label.items()}
        if metric.label == _BUCKET:
            bound = _bound(own[_BUCKET])
            if bound is None:
                continue
            own[_BUCKET] = "+Inf" if math.isinf(bound) else repr(bound)
        name = exposed_name(metric.name.removesuffix(suffix))
        families.add(name, _meaning(metric), value, {**labels, **own}, kind, suffix)


def _meaning(metric: Metric) -> str:
    return f"{_UNITS_IN_WORDS.get(metric.unit, metric.unit)}: {metric.meaning}"


def _of_table(
    table: Sequence[Metric], values: Mapping[str, float]
) -> Iterator[tuple[Metric, Mapping[str, str], float]]:
    """Yield (metric, its label, value) of each field that is in the table, metric by metric, buckets in their order."""
    known = {(metric.name, metric.label): metric for metric in table}
    found = []
    for name, value in values.items():
        metric_name, label, label_value = unlabelled(name)
        if (metric := known.get((metric_name, label))) is not None:
            found.append((metric, {label: label_value} if label else {}, value))
    yield from sorted(found, key=lambda one: (one[0].name, _order(one[1].get(one[0].label, ""))))


def _order(label_value: str) -> tuple[float, str]:
    bound = _bound(label_value)
    return (0.0, label_value) if bound is None else (bound, "")


def _bound(text: str) -> float | None:
    try:
        bound = float(text)
    except ValueError:
        return None
    return None if math.isnan(bound) else bound


def _add_derived(families: _Families, snapshot: Snapshot, labels: Mapping[str, str]) -> None:
    for key, metric in _OF_LEASE.items():
        if key in snapshot.lease:
            _add_own(families, metric, snapshot.lease[key], labels)
    _add_own(families, _QUEUED, snapshot.fleet.queued, labels)
    for module, values in sorted(snapshot.policies.items()):
        for metric, name in ((_POLICY, "return"), (_POLICY_LENGTH, "len")):
            for statistic in ("mean", "min", "max"):
                if (value := values.get(f"{name}_{statistic}")) is not None:
                    _add_own(families, metric, value, {**labels, "module": module, "statistic": statistic})
        if "agents" in values:
            _add_own(families, _POLICY_AGENTS, values["agents"], {**labels, "module": module})
    for task, values in sorted(snapshot.task_figures.items()):
        for name, (own, meaning) in _OF_TASK.items():
            if name in values:
                kind, suffix = ("gauge", "") if name.endswith("_mean") else ("counter", "_total")
                families.add(PREFIX + own, meaning, values[name], {**labels, "task": task}, kind, suffix)
    for name, logged in sorted(snapshot.metrics.items()):
        _add_own(families, _LOGGED, logged.value, {**labels, "name": name})


def _add_process(families: _Families, process: ProcessState, labels: Mapping[str, str]) -> None:
    own = {**labels, "process": process.name, "role": process.role}
    _add_own(families, _PROCESS_RUNNING, process.state == "running", own)
    _add_own(families, _PROCESS_MEMORY, process.rss_bytes, own)
