"""The rows of a run: their columns, and the sources of the values.

The page docs/guides/curves.md explains each column. Rows about the fleet come from a snapshot of Redis, rows
of the learner from its stream there. The page, `headrace report` and all loggers show these same rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from headrace.deploy.loggers import Row
from headrace.deploy.run.goal import RunNumbers
from headrace.deploy.run.redis_view import LearnerRowView, Snapshot
from headrace.schemas.accounts.figures import GAUGE_TABLE, added_up
from headrace.schemas.accounts.lag_buckets import lag_quantiles
from headrace.schemas.accounts.lifetime_counters import COUNTER_TABLE
from headrace.schemas.accounts.redis_keys import QUANTILES, unlabelled

LAG_QUANTILES = (0.5, 0.95)
_LAGS = tuple(metric for metric in GAUGE_TABLE if metric.label == "le")
_TOLD = (metric for metric in (*GAUGE_TABLE, *COUNTER_TABLE) if not metric.name.endswith("unix_s"))
_METRICS = {(metric.name, metric.label): metric for metric in _TOLD if metric not in _LAGS}
_WHOLE = ("epoch", "version", "batches", "workers", "episodes")
"""Units of gauges that are whole numbers, as all counters are."""
_ALWAYS = (
    *("env_steps", "learner_epoch", "weights_seq", "agent_steps", "env_steps_per_s", "episodes", "episodes_window"),
    *("workers", "workers_blocked", "held_batches", "committed_steps", "dropped_steps", "discarded_steps"),
)
"""Columns of each row of the fleet: 0 where Redis has nothing yet."""

COLUMNS = ("kind", "time", "elapsed_s", *_ALWAYS, "restarts", "queued_steps", "weights_lag", "learner_row")
"""The first columns of `headrace report --csv`. Further ones stand after them in the order in which they came up."""


def fleet_row(
    snapshot: Snapshot,
    restarts: Mapping[str, int],
    unix_s: float,
    elapsed_s: float,
    before: Mapping[str, float] = MappingProxyType({}),
) -> Row:
    """Return the row of the whole fleet. `before` has the last row's gauges; histograms cover the time since then."""
    waited_for = [field for field in before if field.startswith("workers_blocked{")]  # no gauge once no worker waits
    values = {**dict.fromkeys(waited_for, 0.0), **snapshot.totals, **snapshot.gauges}
    row: dict[str, Any] = {"kind": "fleet", "time": round(unix_s, 3), "elapsed_s": round(elapsed_s, 3)}
    row |= dict.fromkeys(_ALWAYS, 0)
    for field, told in sorted(values.items()):
        name, label, text = unlabelled(field)
        metric = _METRICS.get((name, label))
        if metric is None or (label == "quantile" and text not in QUANTILES):
            continue
        value = int(told) if metric.unit in _WHOLE or name.endswith("_total") else told
        if label == "reason":
            row[metric.column_for()] = value + row.get(metric.column_for(), 0)
        if value or label != "reason" or field in waited_for:
            row[metric.column_for(text)] = value
    for metric in _LAGS:
        lags = lag_quantiles(metric.name, before, values, LAG_QUANTILES)
        row |= {metric.column_for(str(quantile)): lag for quantile, lag in lags.items()}
    row |= added_up(snapshot.workers.values())
    row |= {"queued_steps": snapshot.fleet.queued, "restarts": sum(restarts.values())}
    row |= {f"restarts/{role}": count for role, count in restarts.items() if count}
    for module_id, returns in snapshot.policies.items():
        row |= {f"policies/{module_id}/{name}": value for name, value in returns.items()}
    return row | {f"callbacks/{name}": metric.value for name, metric in snapshot.metrics.items()}


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
        "evaluation/agent_steps": told["steps"],
        "evaluation/episodes": told["episodes"],
        "evaluation/aborted": told.get("aborted", 0),
        "evaluation/best": int(bool(told.get("best"))),
    }
    several = {f"policies/{key}/return": own for key, own in told.get("return_by_policy", {}).items()}
    for name, own in {"return": told["return"], "len": told["length"], **several}.items():
        row |= {f"evaluation/{name}_{part}": own[part] for part in ("mean", "std", "min", "max")}
    return row
