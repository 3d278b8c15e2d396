"""The rows of a run: their columns, and the sources of the values.

The page docs/guides/what-a-run-leaves.md explains each column. Rows about the fleet come from a snapshot of Redis, rows
of the learner from its stream there. The page, `headrace report` and all loggers show these same rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from headrace.deploy.loggers import Row
from headrace.deploy.report.progress import weights_lag
from headrace.deploy.run.goal import RunNumbers
from headrace.deploy.run.redis_view import LearnerRowView, Snapshot
from headrace.schemas.accounts.lag_buckets import lag_quantiles
from headrace.schemas.accounts.redis_keys import WORKER_RATE, unlabelled

RETURNS_AND_LENGTHS = tuple(
    f"{name}_{reduce}" for name in ("episode_return", "episode_len") for reduce in ("mean", "min", "max")
)
QUANTILES = {"0.05": "p5", "0.25": "p25", "0.5": "p50", "0.75": "p75", "0.95": "p95"}
"""Value of the label `quantile` -> end of the column."""
_PLAIN = (
    *("held_bytes", "held_agent_steps", "oldest_unsettled_age_s", "clients", "client_requests_per_s"),
    *("window_batches", "window_bytes", "compression_ratio", "messages_refused", "redis_failures"),
)
_COUNTED = (
    *("aborted_episodes", "env_failures", "env_rebuilds", "fenced_lives"),
    *("sampled_bytes", "accepted_bytes", "committed_bytes"),
)
"""Counters of the fleet, without their ending `_total`."""
_OF_ABORTED = ("aborted_return_mean", "aborted_len_mean")
_QUANTILES_OF = {
    "episode_return_quantile": "episode_return",
    "episode_len_quantile": "episode_len",
    "client_latency_s": "client_latency_s",
    WORKER_RATE: "worker_env_steps_per_s",
}
_BY_LABEL = {
    "worker_time_share": "worker_time",
    "learner_time_share": "learner_time",
    "process_cpu_share": "process_cpu_share",
    "process_rss_bytes": "process_rss_bytes",
}
_LAGS = {"accepted_lag_agent_steps_bucket": "accepted_lag", "consumed_lag_agent_steps_bucket": "consumed_lag"}
_LAG_QUANTILES = (0.5, 0.95)

COLUMNS = (
    "kind",
    "time",
    "elapsed_s",
    "env_steps",
    "learner_epoch",
    "weights_seq",
    "agent_steps",
    "env_steps_per_s",
    "episodes",
    "episodes_window",
    *RETURNS_AND_LENGTHS,
    "weights_lag",
    "workers",
    "held_batches",
    "restarts",
    "dropped_steps",
    "discarded_steps",
    "learner_row",
    "committed_steps",
    "queued_steps",
)
"""The first columns of `headrace report --csv`. Further ones stand after them in the order in which they came up."""


NOTHING_BEFORE: Mapping[str, float] = MappingProxyType({})


def fleet_row(
    snapshot: Snapshot,
    restarts: Mapping[str, int],
    unix_s: float,
    elapsed_s: float,
    before: Mapping[str, float] = NOTHING_BEFORE,
) -> Row:
    """Return the row of the whole fleet. `before` has the last row's gauges; histograms cover the time since then."""
    gauges, ledger = snapshot.gauges, snapshot.fleet
    numbers = RunNumbers.of(gauges, snapshot.totals)
    dropped = {reason: steps for reason, (steps, _) in ledger.dropped.items()}
    row: dict[str, float | int | str] = {
        "kind": "fleet",
        "time": round(unix_s, 3),
        "elapsed_s": round(elapsed_s, 3),
        "env_steps": numbers.steps,
        "learner_epoch": int(gauges.get("learner_epoch", 0)),
        "weights_seq": int(gauges.get("weights_seq", 0)),
        "agent_steps": ledger.stepped,
        "env_steps_per_s": gauges.get("env_steps_per_s", 0.0),
        "episodes": numbers.episodes,
        "episodes_window": numbers.window,
        **{name: gauges[name] for name in RETURNS_AND_LENGTHS if name in gauges},
        "weights_lag": weights_lag(snapshot),
        "workers": len(snapshot.workers),
        "held_batches": int(gauges.get("held_batches", 0)),
        "committed_steps": ledger.committed[0],
        "queued_steps": ledger.queued,
        **_counter_columns(snapshot.totals),
        **gauge_columns(gauges, before),
        **_with_total("restarts", restarts),
        **_with_total("dropped_steps", dropped),
        **_with_total("discarded_steps", ledger.discarded),
    }
    for module_id, returns in snapshot.policies.items():
        row |= {f"policies/{module_id}/{name}": value for name, value in returns.items()}
    return row | {f"callbacks/{name}": metric.value for name, metric in snapshot.metrics.items()}


def history_row(unix_s: float, values: Mapping[str, float], began_unix_s: float, before: Mapping[str, float]) -> Row:
    """Return the row of the whole fleet for an entry of a history ring in Redis, which `FleetView.history` gave.

    It lacks what the rings do not hold: restarts, queued steps, and numbers by policy.
    """
    totals = {name: int(value) for name, value in values.items() if unlabelled(name)[0].endswith("_total")}
    numbers = RunNumbers.of(values, totals)
    by_reason: dict[str, dict[str, int]] = {"dropped": {}, "discarded": {}}
    for field, count in totals.items():
        name, _, reason = unlabelled(field)
        if reason and name in ("dropped_agent_steps_total", "discarded_agent_steps_total"):
            by_reason[name.partition("_")[0]][reason] = count
    return {
        "kind": "fleet",
        "time": round(unix_s, 3),
        "elapsed_s": round(unix_s - began_unix_s, 3),
        "env_steps": numbers.steps,
        "learner_epoch": int(values.get("learner_epoch", 0)),
        "weights_seq": int(values.get("weights_seq", 0)),
        "agent_steps": totals.get("agent_steps_total", 0),
        "env_steps_per_s": values.get("env_steps_per_s", 0.0),
        "episodes": numbers.episodes,
        "episodes_window": numbers.window,
        **{name: values[name] for name in (*RETURNS_AND_LENGTHS, "workers", "held_batches") if name in values},
        "committed_steps": totals.get("committed_agent_steps_total", 0),
        **_counter_columns(totals),
        **gauge_columns(values, before),
        **_with_total("dropped_steps", by_reason["dropped"]),
        **_with_total("discarded_steps", by_reason["discarded"]),
    }


def _counter_columns(totals: Mapping[str, int]) -> dict[str, int]:
    return {name: totals[f"{name}_total"] for name in _COUNTED if f"{name}_total" in totals}


def gauge_columns(gauges: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """Return the columns of those gauges that exist: an older broker lacks some, and only some fleets have others."""
    row = {name: gauges[name] for name in _PLAIN if name in gauges}
    if gauges.get("aborted_window"):
        row |= {name: gauges[name] for name in _OF_ABORTED if name in gauges}
    blocked = [value for field, value in gauges.items() if unlabelled(field)[0] == "workers_blocked"]
    if blocked:
        row["workers_blocked"] = sum(blocked)
    for field, value in sorted(gauges.items()):
        name, _, label = unlabelled(field)
        if name in _QUANTILES_OF and label in QUANTILES:
            row[f"{_QUANTILES_OF[name]}_{QUANTILES[label]}"] = value
        elif name in _BY_LABEL:
            row[f"{_BY_LABEL[name]}/{label}"] = value
    for name, column in _LAGS.items():
        row |= {
            f"{column}_p{round(100 * q)}": value
            for q, value in lag_quantiles(name, before, gauges, _LAG_QUANTILES).items()
        }
    return row


def learner_row(view: LearnerRowView, began_unix_s: float) -> Row:
    """Return the row of the figures that a learner logged."""
    return {
        "kind": "learner",
        "time": view.unix_s,
        "elapsed_s": round(view.unix_s - began_unix_s, 3),
        "env_steps": view.env_steps,
        "learner_epoch": view.epoch,
        "weights_seq": view.weights_seq,
        "learner_row": f"{view.epoch}-{view.number}",
        **{f"learner/{name}": value for name, value in view.values.items()},
    }


def evaluation_row(told: Mapping[str, Any], snapshot: Snapshot | None, began_unix_s: float) -> Row:
    """Return the row of an evaluation, `told` as in evaluations.jsonl. Its env steps are the fleet's present ones."""
    row: dict[str, float | int | str] = {
        "kind": "evaluation",
        "time": told["unix_s"],
        "elapsed_s": round(told["unix_s"] - began_unix_s, 3),
        "env_steps": RunNumbers.of(snapshot.gauges, snapshot.totals).steps if snapshot is not None else told["steps"],
        "learner_epoch": told["learner_epoch"],
        "agent_steps": told["steps"],
        "evaluation/episodes": told["episodes"],
        "evaluation/best": int(bool(told.get("best"))),
    }
    several = {f"policies/{key}/return": own for key, own in told.get("return_by_policy", {}).items()}
    for name, own in {"return": told["return"], "len": told["length"], **several}.items():
        row |= {f"evaluation/{name}_{part}": own[part] for part in ("mean", "std", "min", "max")}
    return row


def _with_total(name: str, parts: Mapping[str, int]) -> dict[str, int]:
    """Return the sum, and each part that is not 0."""
    return {name: sum(parts.values())} | {f"{name}/{part}": count for part, count in parts.items() if count}
