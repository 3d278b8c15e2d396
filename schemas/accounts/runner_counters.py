"""Lifetime counters of a runner, as they travel to the broker, to Redis, and into the next life of the worker's slot.

They bear the names they have in a runner's report. The counters of several agents or modules have a dict of their own:
{"num_episodes_lifetime": 12, "num_agent_steps_sampled_lifetime": {"agent_0": 400}}.
"""

from __future__ import annotations

from typing import Annotated

import orjson
from pydantic import AfterValidator, TypeAdapter, ValidationError

from headrace.schemas.basics.bounds import Natural

LARGEST_BYTES = 16 << 10
"""The most bytes that the counters of one runner may have as JSON."""


def _check_size(counters: dict[str, int | dict[str, int]]) -> dict[str, int | dict[str, int]]:
    size = len(orjson.dumps(counters))
    if size > LARGEST_BYTES:
        raise ValueError(f"counters of {size} bytes; {LARGEST_BYTES} are allowed")
    return counters


Counters = Annotated[dict[str, Natural | dict[str, Natural]], AfterValidator(_check_size)]

_COUNTERS: TypeAdapter[Counters] = TypeAdapter(Counters)


def fitting(counters: Counters) -> Counters:
    """Return all counters if they fit; for too many agents or modules only the counters that are one number each."""
    for part in (counters, {name: value for name, value in counters.items() if not isinstance(value, dict)}):
        try:
            return _COUNTERS.validate_python(part, strict=True)
        except ValidationError:
            continue
    return {}


def read_counters(text: str) -> Counters:
    """Parse counters from JSON. Raises `ValueError` for anything else."""
    if len(text) > LARGEST_BYTES:
        raise ValueError(f"{len(text)} characters; {LARGEST_BYTES} are allowed")
    return _COUNTERS.validate_json(text, strict=True)


def larger(ours: Counters, theirs: Counters) -> Counters:
    """Return the larger value of each counter, since no counter goes back, limited by `fitting`.

    Where a counter is a number in one and a dict in the other, take `theirs`.
    """
    if ours == theirs:
        return ours
    merged = dict(ours)
    for name, value in theirs.items():
        known = merged.get(name)
        if isinstance(value, dict) and isinstance(known, dict):
            merged[name] = known | {part: max(count, known.get(part, 0)) for part, count in value.items()}
        elif isinstance(value, int) and isinstance(known, int):
            merged[name] = max(known, value)
        else:
            merged[name] = value
    return fitting(merged)
