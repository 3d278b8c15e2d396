"""Chunks are the recorded ones to the bit, whatever the sampling side looks like inside.

`chunks.json` has short digests for each case: one for each call, and one for each part of what chunks carry. A part
that differs says what changed, a call says since when. `make golden` records cases that are missing.

    .venv/bin/python -m pytest tests/golden -n 2 --dist worksteal [-k inline]
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import golden_chunks
import pytest
from golden_cases import CASES
from golden_play import Hosts, play

# Of Gymnasium's and PettingZoo's own code.
pytestmark = pytest.mark.filterwarnings("ignore")

RECORDED = golden_chunks.read()


@pytest.fixture(scope="session")
def env_hosts() -> Iterator[Hosts]:
    with Hosts() as started:
        yield started


@pytest.fixture(scope="session")
def rounding() -> str:
    """Return how this machine rounds."""
    return golden_chunks.probe()


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", CASES)
def test_chunks_are_the_recorded_ones(name: str, env_hosts: Hosts, rounding: str) -> None:
    case = CASES[name]
    assert name in RECORDED, "not recorded yet; run make golden"
    if not case.exact and rounding != RECORDED[golden_chunks.PROBE]:
        pytest.skip("this machine rounds floats otherwise than the one that recorded, and the case is not exact")
    found, expected = play(case, env_hosts), RECORDED[name]
    assert _changed(found["parts"], expected["parts"]) == {}, f"calls: {found['calls']}, were {expected['calls']}"
    assert found["calls"] == expected["calls"]


def test_every_record_has_its_case() -> None:
    assert set(RECORDED) - {golden_chunks.PROBE} == set(CASES)


def _changed(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, str]:
    parts = sorted(found.keys() | expected.keys())
    return {
        part: f"{found.get(part)}, was {expected.get(part)}" for part in parts if found.get(part) != expected.get(part)
    }
