"""The rows of a run: what the columns are, and where their values come from.

The page docs/guides/what-a-run-leaves.md explains each column. Rows about the fleet come from a snapshot of Redis, rows
of the learner from its stream there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.deploy.goal import RunNumbers
from headrace.deploy.loggers import Row
from headrace.deploy.progress import weights_lag
from headrace.deploy.redis_view import LearnerRowView, Snapshot

RETURNS_AND_LENGTHS = tuple(
    f"{name}_{reduce}" for name in ("episode_return", "episode_len") for reduce in ("mean", "min", "max")
)

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
)
"""The first columns of `metrics.csv`. Further ones stand after them in the order in which they came up."""


def fleet_row(snapshot: Snapshot, restarts: Mapping[str, int], unix_s: float, elapsed_s: float) -> Row:
    """Return the row of the whole fleet."""
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
        **_with_total("restarts", restarts),
        **_with_total("dropped_steps", dropped),
        **_with_total("discarded_steps", ledger.discarded),
    }
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
        "agent_steps": told["steps"],
        "evaluation/episodes": told["episodes"],
        "evaluation/best": int(told["best"]),
    }
    several = {f"policies/{key}/return": own for key, own in told.get("return_by_policy", {}).items()}
    for name, own in {"return": told["return"], "len": told["length"], **several}.items():
        row |= {f"evaluation/{name}_{part}": own[part] for part in ("mean", "std", "min", "max")}
    return row


def _with_total(name: str, parts: Mapping[str, int]) -> dict[str, int]:
    """Return the sum, and each part that is not 0."""
    return {name: sum(parts.values())} | {f"{name}/{part}": count for part, count in parts.items() if count}
