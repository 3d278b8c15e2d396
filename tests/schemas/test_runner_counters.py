"""Lifetime counters on the wire: bounded, checked when they are read, and never decreasing."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from headrace.schemas.accounts.ledger import WorkerTotals
from headrace.schemas.accounts.runner_counters import LARGEST_BYTES, Counters, fitting, larger, read_counters
from headrace.schemas.errors import DecodeError
from headrace.schemas.messages import Heartbeat, read

MANY: Counters = {
    "num_episodes_lifetime": 3,
    "num_agent_steps_sampled_lifetime": {f"agent_{i}": i for i in range(2000)},
}


def test_merging_keeps_the_larger_value_of_each_counter() -> None:
    ours: Counters = {"a": 5, "by": {"x": 1, "y": 9}, "only": 2}
    theirs: Counters = {"a": 4, "by": {"x": 3, "z": 1}, "other": {"m": 1}}
    assert larger(ours, theirs) == {"a": 5, "by": {"x": 3, "y": 9, "z": 1}, "only": 2, "other": {"m": 1}}
    assert larger({"a": 1}, {"a": {"x": 2}}) == {"a": {"x": 2}}


def test_counters_by_agent_are_left_out_when_they_are_too_many() -> None:
    assert fitting(MANY) == {"num_episodes_lifetime": 3}
    assert larger(MANY, {"num_episodes_lifetime": 4}) == {"num_episodes_lifetime": 4}
    assert fitting({f"counter_{i}": i for i in range(2000)}) == {}


def test_a_heartbeat_of_too_many_counters_is_refused() -> None:
    beat = Heartbeat(slot=0, incarnation=1, totals=WorkerTotals(), counters={"a": 1})
    assert read(Heartbeat, beat.model_dump()).counters == {"a": 1}
    with pytest.raises(DecodeError, match=r"counters: Value error, counters of \d+ bytes; 16384 are allowed"):
        read(Heartbeat, {**beat.model_dump(), "counters": MANY})


@pytest.mark.parametrize(
    "text",
    ["", "7", "[]", '{"a": -1}', '{"a": 1.5}', '{"a": "1"}', '{"a": {"b": {"c": 1}}}', '{"a": true}', "\x80\x04K"],
)
def test_malformed_counters_are_refused(text: str) -> None:
    with pytest.raises((ValueError, ValidationError)):
        read_counters(text)


def test_counters_in_too_long_a_text_are_refused() -> None:
    with pytest.raises(ValueError, match="allowed"):
        read_counters("{" * (LARGEST_BYTES + 1))
    known: dict[str, Any] = {"a": 1, "by": {"x": 2}}
    assert read_counters('{"a": 1, "by": {"x": 2}}') == known
