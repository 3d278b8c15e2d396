"""The reference of Redis keys, from the table in the code."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.schemas.accounts import figures
from headrace.schemas.accounts import redis_keys as keys
from headrace.schemas.accounts.lifetime_counters import COUNTER_TABLE


def redis_keys_as_markdown() -> str:
    """Return a section for each key, and the tables of counters and gauges behind theirs."""
    return "\n".join(line for key in keys.TABLE for line in _section(key))


def _section(key: keys.Key) -> Iterable[str]:
    yield from (f"## {key.name}", "", f"{key.meaning[0].upper()}{key.meaning[1:]}.", "")
    facts = {
        "type": key.type,
        "unit": key.unit,
        "written by": key.writer,
        "when": key.when or "each report that has news of it",
        "expires": key.expires or "never",
        "example": f"`{key.example}`",
    }
    yield from ("| | |", "|---|---|")
    yield from (f"| {name} | {fact} |" for name, fact in facts.items() if fact)
    yield ""
    tables = {
        keys.TOTALS: COUNTER_TABLE,
        keys.GAUGES: figures.GAUGE_TABLE,
        keys.WORKERS: figures.WORKER_TABLE,
        keys.SUPERVISOR_TOTALS: (figures.RESTARTS,),
    }
    if key in tables:
        yield from ("| name | unit | meaning |", "|---|---|---|")
        yield from (
            f"| `{_field(metric)}` | {metric.unit} | {metric.meaning} |"
            for metric in tables[key]
        )
        yield ""


def _field(metric: figures.Metric) -> str:
    return (
        keys.labelled(metric.name, metric.label, metric.label.upper())
        if metric.label
        else metric.name
    )
