"""Metrics that people log in a fleet: by callbacks on workers, and by the learner. Each is a number with a name.

A name is 1 to 100 printable ASCII characters. A worker's message is cumulative, so a lost one costs nothing. A
learner's rows are numbered, so the broker recognizes a repeated one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from headrace.schemas.basics.bounds import IncarnationOrNone, Natural

MOST_METRICS = 64
"""Most metrics of callbacks that one worker reports."""

MOST_VALUES = 128
"""Most values in one row of a learner."""

NOT_FINITE = "not_finite/"
"""Prefix of the name of a learner's metric while its value is NaN or infinite, which no row carries."""

_NAME = r"^[ -~]{1,100}$"
_is_name = re.compile(_NAME).fullmatch

MetricName = Annotated[str, Field(pattern=_NAME)]

_MODEL = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)


class LoggedMetric(BaseModel):
    """One metric of one worker, or of a fleet: its value, and the number of logged values in it."""

    model_config = _MODEL
    reduce: Literal["mean", "min", "max", "sum"]
    value: float
    count: Natural = 1


LoggedMetrics = Annotated[dict[MetricName, LoggedMetric], Field(max_length=MOST_METRICS)]

RowValues = Annotated[dict[MetricName, float], Field(max_length=MOST_VALUES)]
"""The values of one row by name."""


class SumsOfLife(BaseModel):
    """The sums that callbacks logged in one life of a slot. Incarnation 0: those of all lives that are over."""

    model_config = _MODEL
    incarnation: IncarnationOrNone = 0
    sums: dict[MetricName, float] = {}


def is_metric_name(name: object) -> bool:
    """Return whether `name` may be the name of a metric."""
    return isinstance(name, str) and _is_name(name) is not None


def fitting_metrics(metrics: Mapping[str, LoggedMetric]) -> dict[str, LoggedMetric]:
    """Return the metrics that one worker may report: those with a valid name, the first `MOST_METRICS` of them."""
    named = {name: metric for name, metric in metrics.items() if is_metric_name(name)}
    return dict(list(named.items())[:MOST_METRICS])
