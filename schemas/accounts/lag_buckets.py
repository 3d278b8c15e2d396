"""Counts of agent steps by their lag: by how many versions the weights that chose them were behind the newest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Annotated

from pydantic import Field

from headrace.schemas.accounts.redis_keys import labelled
from headrace.schemas.basics.bounds import ListOf, Natural

LAG_BOUNDS = (0, 1, 2, 4, 8, 16, 32, 64)
"""The largest lag in each bucket but the last, which has no bound."""

LAG_BUCKETS = len(LAG_BOUNDS) + 1

LAG_LABELS = (*map(str, LAG_BOUNDS), "+Inf")
"""Values of the label `le` of each bucket, as Prometheus names them."""

LagCounts = Annotated[ListOf[Natural], Field(max_length=64)]
"""Agent steps in each bucket; those of a peer with other buckets cannot be used."""


def up_to(counts: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Yield (label, agent steps with at most this lag) of each bucket."""
    yield from zip(LAG_LABELS, accumulate(counts), strict=True)


def lag_quantiles(
    metric: str, before: Mapping[str, float], now: Mapping[str, float], quantiles: Sequence[float]
) -> dict[float, float]:
    """Return quantiles of the lag of the steps that came between two moments, as bounds of buckets; empty for none.

    `before` and `now` have the cumulative counts of `metric` by their fields. A broker that has started since counts
    from 0 again. For a lag beyond the last bound, return the last bound.
    """
    fields = [labelled(metric, "le", le) for le in LAG_LABELS]
    counts = [now.get(field, 0.0) for field in fields]
    earlier = [before.get(field, 0.0) for field in fields]
    if all(count >= start for count, start in zip(counts, earlier, strict=True)):
        counts = [count - start for count, start in zip(counts, earlier, strict=True)]
    if not counts[-1] > 0:
        return {}
    pairs = [*zip((*LAG_BOUNDS, LAG_BOUNDS[-1]), counts, strict=True)]
    return {
        quantile: next(float(bound) for bound, count in pairs if count >= quantile * counts[-1])
        for quantile in quantiles
    }
