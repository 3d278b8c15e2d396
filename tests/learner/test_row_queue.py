"""Rows that a learner logs: metrics that it may log, and when rows are sent again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from headrace.learner_stub.publishing.row_queue import GATHER_S, MOST_WAITING, RowQueue
from headrace.schemas.messages.learner_messages import MOST_ROWS


def test_a_row_takes_int_float_numpy_torch_and_bool_metrics() -> None:
    rows = RowQueue()
    rows.add({"a": 1, "b": np.float32(0.5), "c": torch.tensor(2.0, requires_grad=True), "d": True}, 3, 7, 5.0)
    (row,) = rows.due(0.0)
    assert (row.epoch, row.number, row.weights_seq) == (3, 5_000_000, 7)
    assert row.values == {"a": 1.0, "b": 0.5, "c": 2.0, "d": 1.0}


def test_rows_are_in_order_though_the_clock_goes_back() -> None:
    rows = RowQueue()
    for unix_s in (5.0, 4.0, 4.0, 6.0):
        rows.add({"a": 1.0}, 1, 0, unix_s)
    assert [row.number for row in rows.due(0.0)] == [5_000_000, 5_000_001, 5_000_002, 6_000_000]


def test_numbers_that_are_not_finite_are_left_out_and_named_once(caplog: pytest.LogCaptureFixture) -> None:
    rows = RowQueue()
    for _ in range(3):
        rows.add({"loss": float("nan"), "kl": 0.5}, 1, 0, 1.0)
    rows.add({"loss": float("inf")}, 1, 0, 1.0)
    rows.add({"other": 1.0}, 1, 0, 1.0)
    rows.add({"loss": np.ma.masked, "other": np.ma.array(3.0)}, 1, 0, 1.0)  # item() of a masked number is 0
    rows.add({"loss": 2.0}, 1, 0, 1.0)
    marked = {"not_finite/loss": 1.0}
    told = [{"kl": 0.5, **marked}] * 3 + [marked, {"other": 1.0, **marked}, {"other": 3.0, **marked}, {"loss": 2.0}]
    assert [row.values for row in rows.due(0.0)] == told, "the mark stays until the metric is finite again"
    assert caplog.text.count("metric loss is nan") == 1


@pytest.mark.parametrize(
    ("metrics", "says"),
    [
        ({"": 1.0}, "'' is no name for a metric"),
        ({"a\nb": 1.0}, "is no name for a metric"),
        ({"é": 1.0}, "printable ASCII"),
        ({"x" * 101: 1.0}, "1 to 100"),
        ({3: 1.0}, "3 is no name"),
        ({"a": "high"}, "metric a was given 'high', which is no single number"),
        ({"a": torch.ones(2)}, "no single number"),
        ({"a": 10**400}, "metric a was given 1000.*, which is no single number"),
        pytest.param({"a": 10**5000}, r"metric a was given a int .*, which is no single number", id="5,000 digits"),
        pytest.param({10**5000: 1.0}, "is no name for a metric", id="a name of 5,000 digits"),
        ({str(n): 1.0 for n in range(129)}, "129 metrics were logged at once; 128 are allowed"),
    ],
)
def test_a_metric_that_cannot_be_logged_raises_an_error(metrics: dict[Any, Any], says: str) -> None:
    rows = RowQueue()
    with pytest.raises(ValueError, match=says):
        rows.add(metrics, 1, 0, 1.0)
    assert rows.due(0.0) == []


def test_rows_are_sent_in_batches_and_resent_until_they_are_stored() -> None:
    rows = RowQueue()
    for number in range(1, 41):
        rows.add({"a": number}, 1, 0, number / 1e6)
    numbers = [row.number for row in rows.due(0.0)]
    assert numbers == list(range(1, MOST_ROWS + 1))
    assert rows.due(GATHER_S / 2) == []
    assert [row.number for row in rows.due(GATHER_S)] == list(range(MOST_ROWS + 1, 41))
    rows.stored((1, 10))
    assert rows.due(10.0) == []
    rows.send_again()
    assert [row.number for row in rows.due(20.0)] == list(range(11, 41))
    rows.stored((2, 0))
    rows.send_again()
    assert rows.due(30.0) == []


def test_the_oldest_of_too_many_rows_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    rows = RowQueue()
    for number in range(1, MOST_WAITING + 11):
        rows.add({"a": number}, 1, 0, number / 1e6)
    assert rows.due(0.0)[0].number == 11
    assert caplog.text.count("the oldest are dropped") == 1
