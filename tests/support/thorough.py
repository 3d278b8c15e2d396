"""What only `make test-long` runs: breadth that a change seldom needs. `make test` runs a fixed sample of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

ONE_IN = 8
"""Of the simulators' schedules, `make test` runs one in this many."""


def one_in(number: int, values: Iterable[Any], first: int = 0) -> list[Any]:
    """Return values for `parametrize`: each `number`-th from `first` on, and the others for `make test-long` only."""
    return [
        value if at % number == first else pytest.param(value, marks=pytest.mark.thorough)
        for at, value in enumerate(values)
    ]


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
