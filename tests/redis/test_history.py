"""The history in Redis: an hour at 5 s, a day at a minute, bounded, and kept through restarts."""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from headrace.broker.redis.rows import ReceivedRow, append_rows
from headrace.broker.reports.report import MergeScript, Part, Report
from headrace.deploy.run.redis_view import FleetView
from headrace.schemas.accounts import redis_keys as keys
from headrace.schemas.accounts.figures import GAUGE_TABLE, WORKER_TABLE
from headrace.schemas.accounts.lag_buckets import LAG_LABELS
from headrace.schemas.accounts.ledger import LedgerRow
from headrace.schemas.accounts.lifetime_counters import COUNTER_TABLE, without_row_counters
from headrace.schemas.accounts.logged_metrics import LoggedMetric
from headrace.schemas.accounts.worker_figures import BLOCKED_BY
from headrace.schemas.messages import LearnerRow
from headrace.schemas.messages.learner_messages import LEARNER_PARTS

MakeRow = Callable[..., LedgerRow]
BEGAN = 1_795_280_000.0
RING_BYTES = 3 << 20
"""More than both streams of a fleet may take together in its own Redis."""
ENTRY_BYTES = 4000
"""More than an entry may have: where nodes of streams are small, each entry keeps its names, and 2,160 take 9 MB."""


LABELS = {
    "quantile": keys.QUANTILES,
    "le": LAG_LABELS,
    "group": (),
    "key": ("worker.gpu", "client.phones"),
    "reason": ("learner", "weights", "window", "round"),
    "role": ("broker", "learner"),
}
PARTS = {keys.LEARNER_TIME: LEARNER_PARTS}


def every_gauge() -> list[str]:
    """Return the field of each gauge, with all values that its label usually has."""
    fields = []
    for metric in GAUGE_TABLE:
        values = PARTS.get(metric.name) or LABELS.get(metric.label, ("a", "b", "c", "d", "e", "f"))
        fields += [keys.labelled(metric.name, metric.label, one) for one in values] if metric.label else [metric.name]
    return fields


def counters_of_lives() -> list[str]:
    """Return the field of each counter that a ledger row does not have, with all values of its label."""
    every = [
        keys.labelled(metric.name, metric.label, one) if metric.label else metric.name
        for metric in COUNTER_TABLE
        for one in (BLOCKED_BY if metric.label == "reason" else ("",))
    ]
    return list(without_row_counters(dict.fromkeys(every, 0)))


class Clock:
    """A clock that the test moves, in unix seconds."""

    def __init__(self) -> None:
        self.now = BEGAN

    def __call__(self) -> float:
        return self.now


@pytest.mark.long
def test_both_history_streams_are_regular_bounded_and_continue_after_restarts(
    url: str, client: Any, fleet_id: str, make_row: MakeRow
) -> None:
    clock = Clock()
    merge = MergeScript(client, fleet_id, clock=clock)
    random = Random(0)

    def report(seconds: float, batches: int) -> None:
        clock.now += seconds
        rows = [make_row(0, 1, batches, batches)]
        gauges = {name: random.random() for name in every_gauge()}
        counters = {(0, 1): dict.fromkeys(counters_of_lives(), 1_000_000 * batches)}
        report = Report(rows=rows, counters=counters, gauges=gauges | {"env_steps_per_s": clock.now - BEGAN})
        merge(Part(report), [], 0)

    for i in range(800):
        for seconds in (5.0,) if i % 10 else (2.5, 2.5):
            report(seconds, 1 + i // 100)
        if i == 400:
            merge = MergeScript(client, fleet_id, clock=clock)  # another broker
    for i in range(1500):
        report(60.0, 9 + i // 100)
    with FleetView(url, fleet_id) as view:
        fine, coarse = view.history(5), view.history(60)
        assert [row for row in fine if row[0] > fine[-3][0]] == view.history(5, fine[-3][0])
    for history, interval, most in ((fine, 5, 720), (coarse, 60, 1440)):
        times = [at for at, _ in history]
        assert len(times) == most
        assert all(at % interval == 0 for at in times)
        assert times == sorted(set(times))
        assert times[-1] <= clock.now < times[-1] + 60
        committed = [values["committed_agent_steps_total"] for _, values in history]
        assert committed == sorted(committed)
        assert all(0 <= values["env_steps_per_s"] + BEGAN - at < interval for at, values in history)
        moments = {name for name in every_gauge() if name.endswith("unix_s")}
        kept = {*every_gauge(), *counters_of_lives(), "episodes_total"} - moments
        assert all(values.keys() >= kept and not values.keys() & moments for _, values in history)
        means = [values["episode_return_mean"] for _, values in history]
        assert means == [float(f"{mean:.6g}") for mean in means]
    names = [keys.key_name(fleet_id, key) for key, _, _ in keys.RINGS]
    assert sum(client.memory_usage(name, samples=0) for name in names) < RING_BYTES
    ((_, fields),) = client.xrevrange(names[0], count=1)
    assert sum(len(name) + len(value) for name, value in fields.items()) < ENTRY_BYTES


def test_each_interval_has_one_entry_however_often_it_is_reported(
    client: Any, fleet_id: str, make_row: MakeRow
) -> None:
    clock = Clock()
    for merge in (MergeScript(client, fleet_id, clock=clock), MergeScript(client, fleet_id, clock=clock)):
        for _ in range(10):
            clock.now += 0.5
            merge(Part(Report(rows=[make_row()], gauges={"held_batches": 1.0})), [], 0)
            merge(Part(Report(rows=[make_row()]), is_first=False), [], 0)
    entries = client.xrange(keys.key_name(fleet_id, keys.HISTORY_5S))
    assert [identity for identity, _ in entries] == [b"1795280000000-0", b"1795280005000-0", b"1795280010000-0"]


@pytest.mark.parametrize("wrong_ms", [1_795_290_000_000, 18_446_744_073_709_551_615])
def test_a_time_far_ahead_does_not_end_the_history(
    client: Any, fleet_id: str, make_row: MakeRow, wrong_ms: int
) -> None:
    clock, name = Clock(), keys.key_name(fleet_id, keys.HISTORY_5S)
    client.xadd(name, {"held_batches": "1"}, id=f"{wrong_ms}-0")
    MergeScript(client, fleet_id, clock=clock)(Part(Report(rows=[make_row()], gauges={"held_batches": 1.0})), [], 0)
    assert [identity for identity, _ in client.xrange(name)] == [b"1795280000000-0"]


def test_the_history_leaves_out_steps_by_module(client: Any, fleet_id: str, make_row: MakeRow) -> None:
    row = make_row()
    totals = row.totals.model_copy(update={"module_steps": {"one": row.accepted[0]}})
    row = row.model_copy(update={"totals": totals})
    MergeScript(client, fleet_id)(Part(Report(rows=[row], gauges={"unix_s": time.time()})), [], 0)
    field = b'accepted_module_agent_steps_total{module="one"}'
    assert field in client.hgetall(keys.key_name(fleet_id, keys.TOTALS))
    ((_, fields),) = client.xrange(keys.key_name(fleet_id, keys.HISTORY_60S))
    assert b'dropped_agent_steps_total{reason="stale"}' in fields
    assert field not in fields


@pytest.mark.thorough
def test_all_keys_of_a_fleet_take_the_memory_that_the_reference_states(
    client: Any, fleet_id: str, make_row: MakeRow
) -> None:
    clock = Clock()
    merge = MergeScript(client, fleet_id, clock=clock)
    workers = {slot: {member.name: 123456.789 for member in WORKER_TABLE} for slot in range(64)}
    for i in range(2300):
        clock.now += 5.0 if i < 800 else 60.0
        gauges = dict.fromkeys(every_gauge(), i / 7)
        rows = [make_row(slot, 1, i + 1, i) for slot in range(64)] if i % 100 == 0 else []
        counters = {(row.slot, row.incarnation): dict.fromkeys(counters_of_lives(), 1000 * i) for row in rows}
        merge(Part(Report(rows=rows, counters=counters, gauges=gauges, workers=workers)), [], 0)

    def memory() -> float:
        names = list(client.scan_iter(f"*{fleet_id}*"))
        assert len(names) >= 8
        return float(sum(client.memory_usage(name, samples=0) for name in names)) / 2**20

    def log_rows(epoch: int, values: int) -> None:
        rows = [
            LearnerRow(epoch=epoch, number=i + 1, values={f"loss/part_{n}": i / 7 + n for n in range(values)})
            for i in range(4200)
        ]
        append_rows(client, fleet_id, [ReceivedRow(row, clock.now, 10**6) for row in rows])

    assert memory() < 2.5
    log_rows(1, 20)
    assert memory() < 5.5
    log_rows(2, 128)
    group = dict.fromkeys(("kind", "env", "exception", "message", "where"), "x" * 200)
    merge(
        Part(
            Report(
                policies={f"policy_{i}": {"return_mean": i / 7, "len_mean": i / 3} for i in range(512)},
                metrics={f"metric_{i}": LoggedMetric(reduce="sum", value=i / 7) for i in range(256)},
                metric_sums={},
                env_errors={f"{i:016x}": group | {"traceback": "x" * 4000, "count": i} for i in range(100)},
            )
        ),
        [],
        0,
    )
    assert memory() < 24
