"""Rates and counters by what they are of: steps of envs, of agents, and of one module's agents."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.broker.core import BrokerCore
from headrace.broker.limits import BrokerLimits
from headrace.broker.metrics import FleetMetrics
from headrace.broker.source import Source, StoredBatch
from headrace.schemas.batch import BatchHeader
from headrace.schemas.ledger import LedgerRow, Settled, WorkerTotals
from headrace.schemas.redis_keys import row_counters


def header(seq: int, steps: int, **totals: Any) -> BatchHeader:
    return BatchHeader(
        fleet_id="f", slot=0, incarnation=1, seq=seq, steps=steps, chunks=1, totals=WorkerTotals(seq=seq, **totals)
    )


def rate(*headers: BatchHeader) -> float:
    """Env steps a second of batches that came at seconds 0, 1, 2 and so on, at the end of the last of these."""
    metrics = FleetMetrics()
    for second, each in enumerate(headers):
        metrics.observe(each, nbytes=1, now=float(second))
    return metrics.report(BrokerCore("f", BrokerLimits()), now=float(len(headers))).gauges["env_steps_per_s"]


def test_the_rate_is_of_env_steps_whoever_acted_in_them() -> None:
    assert rate(header(1, 60, stepped=60, env_steps=30), header(2, 40, stepped=100, env_steps=50)) == 25.0


def test_a_worker_that_tells_no_env_steps_has_one_agent() -> None:
    assert rate(header(1, 60, stepped=60), header(2, 40, stepped=100)) == 50.0


def test_what_a_worker_did_before_this_broker_heard_of_it_makes_no_rate() -> None:
    assert rate(header(7, 60, stepped=10**6), header(8, 40, stepped=10**6 + 40)) == 20.0


@pytest.mark.parametrize(("env_steps", "expected"), [(50, 50), (0, 0), (None, 100)])
def test_the_counters_tell_env_steps_from_agents_steps(env_steps: int | None, expected: int) -> None:
    totals = WorkerTotals(stepped=100, shipped=90, open=10, env_steps=env_steps, module_steps={"one": 60, "two": 30})
    row = LedgerRow(slot=0, incarnation=1, totals=totals, accepted=(90, 3), held=(90, 3), settled=Settled())
    counters = row_counters(row)
    assert (counters["env_steps_sampled_total"], counters["agent_steps_sampled_total"]) == (expected, 100)
    assert (counters["module_steps_one_total"], counters["module_steps_two_total"]) == (60, 30)


def test_a_worker_lags_by_the_weights_of_its_newest_batch_not_of_its_last_heartbeat() -> None:
    source = Source(0, 1, weights=(1, 80))
    source.accept(StoredBatch(1, 8, 1, 9, None, 1, 0.0, weights=(1, 93)), WorkerTotals(seq=1))
    assert source.weights == (1, 93)
    source.accept(StoredBatch(2, 8, 1, 9, None, 2, 0.0, weights=(1, 92)), WorkerTotals(seq=2))
    assert source.weights == (1, 93)
