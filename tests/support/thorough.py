"""Breadth that a change seldom needs, for `make test-long` alone. `make test` runs a fixed sample of it."""

from __future__ import annotations

from typing import Any

import pytest

ONE_IN = 8
"""`make test` runs one in so many schedules of the simulators, mutated messages and kills of a recorder."""


def schedules(counts: dict[str, int]) -> list[Any]:
    """Return (name, seeds) for `parametrize`: a sample of each name's schedules, and the rest for `make test-long`."""
    return [
        row
        for name, count in counts.items()
        for row in (
            pytest.param(name, range(count // ONE_IN), id=name),
            pytest.param(name, range(count // ONE_IN, count), id=f"{name}, the rest", marks=pytest.mark.thorough),
        )
    ]
