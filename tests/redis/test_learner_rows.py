"""Rows of a learner and metrics of callbacks reach Redis once each, through crashes of broker and Redis."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.broker.files.state_file import read_broker_file
from headrace.broker.redis.rows import ReceivedRow
from headrace.broker.reports.report import Report
from headrace.broker.reports.reporter import RedisReporter
from headrace.broker.reports.worker_metrics import MOST_NAMES, WorkerMetrics
from headrace.deploy.run.redis_view import FleetView, LearnerRowView
from headrace.learner_stub import EpisodeStream, WeightPublisher
from headrace.schemas.accounts.logged_metrics import LoggedMetric
from headrace.schemas.accounts.redis_keys import LEARNER_ROWS, METRICS, key_name
from headrace.schemas.messages import LearnerRow
from support.pipeline.delivery import FLEET, broker_process
from support.waiting import wait_until

pytestmark = pytest.mark.processes

MakeServer = Callable[..., Any]


def received(*numbers: int, epoch: int = 1) -> list[ReceivedRow]:
    rows = [LearnerRow(epoch=epoch, number=n, weights_seq=n, values={"loss": n / 8}) for n in numbers]
    return [ReceivedRow(row, unix_s=1000.0 + row.number, env_steps=64 * row.number) for row in rows]


def read(url: str, fleet_id: str, after: tuple[int, int] = (0, 0)) -> list[LearnerRowView]:
    with FleetView(url, fleet_id) as view:
        return view.learner_rows(after)


def test_a_row_is_stored_once_and_readers_continue_after_their_last_row(url: str, fleet_id: str) -> None:
    """A learner that heard no answer sends rows again, and the broker it sends them to may be another one."""
    for rows in (received(1, 2, 3), received(2, 3, 4), received(1, epoch=2)):
        reporter = RedisReporter(url, fleet_id)
        reporter.offer_rows(rows)
        assert reporter.close(30.0)
    identities = [(1, 1), (1, 2), (1, 3), (1, 4), (2, 1)]
    assert [row.identity for row in read(url, fleet_id)] == identities
    assert [row.identity for row in read(url, fleet_id, (1, 3))] == identities[3:]
    assert read(url, fleet_id)[3] == LearnerRowView(1, 4, 1004.0, 256, 4, {"loss": 0.5})


def test_rows_wait_for_a_redis_that_is_away(fleet_id: str, make_server: MakeServer) -> None:
    server = make_server().start()
    reporter = RedisReporter(server.url, fleet_id)
    reporter.offer_rows(received(1))
    wait_until(lambda: reporter.rows_stored == (1, 1))
    server.kill()
    failures = reporter.failures
    for number in range(2, 50):
        reporter.offer_rows(received(number))
    wait_until(lambda: reporter.failures > failures)
    assert reporter.rows_stored == (1, 1)
    server.start()
    assert reporter.close(30.0)
    assert reporter.rows_stored == (1, 49)
    assert [row.number for row in read(server.url, fleet_id)] == list(range(1, 50))


def test_malformed_rows_in_redis_are_skipped(url: str, fleet_id: str, client: Any) -> None:
    key = key_name(fleet_id, LEARNER_ROWS)
    for number, values in enumerate([b"[]", b'{"a": NaN}', b'{"a": "b"}', b'{"\\u0007": 1}', b"{"], start=1):
        fields = {"unix_s": "1", "env_steps": "1", "weights_seq": "1", "values": values}
        client.xadd(key, fields, id=f"1-{number}")
    client.xadd(key, {"else": "1"}, id="1-90")
    client.xadd(key, {"unix_s": "1", "env_steps": "1", "weights_seq": "1", "values": b'{"a": 2}'}, id="1-91")
    rows = read(url, fleet_id)
    assert [(row.number, dict(row.values)) for row in rows if row.values] == [(91, {"a": 2.0})]
    assert rows[-1].identity == (1, 91)


@pytest.mark.chaos
def test_a_learner_logs_through_the_death_of_broker_and_redis(tmp_path: Path, make_server: MakeServer) -> None:
    server = make_server().start()
    broker = broker_process(tmp_path, server.url, report_interval_s=0.05)
    state = read_broker_file(tmp_path)
    assert state is not None
    logged = 0

    def log(weights: WeightPublisher) -> None:
        nonlocal logged
        logged += 1
        weights.log({"number": logged, "nan": float("nan")})

    def stored() -> list[float]:
        return [row.values["number"] for row in read(server.url, FLEET)]

    endpoint = state.endpoints.learner
    with EpisodeStream(endpoint) as stream, WeightPublisher(endpoint) as weights:

        def until_stored(count: int) -> None:
            def enough() -> bool:
                stream.next(timeout_s=0.01)
                return len(stored()) >= count

            wait_until(enough, f"{count} rows in Redis")

        for _ in range(3):
            log(weights)
        until_stored(3)
        server.signal(signal.SIGKILL)
        server.kill()
        for _ in range(50):
            log(weights)
        broker.signal(signal.SIGKILL)  # with rows that no Redis has
        broker.wait()
        for _ in range(50):
            log(weights)
        server.start()
        with broker_process(tmp_path, server.url, report_interval_s=0.05):
            until_stored(103)
            log(weights)
            until_stored(104)
    assert stored() == list(range(1, 105))
    broker.wait()


def metric(reduce: Any, value: float, count: int = 1) -> LoggedMetric:
    return LoggedMetric(reduce=reduce, value=value, count=count)


def test_metrics_of_workers_are_merged_by_their_reduction() -> None:
    metrics = WorkerMetrics()
    metrics.take(0, 1, {"m": metric("mean", 1.0, 3), "lo": metric("min", -1.0), "hi": metric("max", 5.0)})
    metrics.take(1, 1, {"m": metric("mean", 5.0, 1), "lo": metric("min", -2.0), "hi": metric("max", 4.0)})
    metrics.take(1, 1, {"m": metric("mean", 9.0, 1), "lo": metric("min", -2.0), "hi": metric("sum", 4.0)})
    merged = metrics.merged()
    assert (merged["m"], merged["lo"], merged["hi"]) == (
        metric("mean", 3.0, 4),
        metric("min", -2.0, 2),
        metric("max", 5.0, 1),
    )


def test_sums_continue_through_restarts_and_are_never_counted_twice(url: str, fleet_id: str) -> None:
    def restarted(before: WorkerMetrics, *already: Any) -> WorkerMetrics:
        """The next broker's, which has what the one before had reported."""
        reporter = RedisReporter(url, fleet_id)
        reporter.offer(Report(metrics=before.merged(), metric_sums=before.sums()))
        assert reporter.close(30.0)
        following = RedisReporter(url, fleet_id)
        saved = following.take_saved(wait_s=30.0)
        following.close(1.0)
        assert saved is not None
        after = WorkerMetrics()
        for life in already:  # a worker may speak before Redis does
            after.take(*life)
        after.go_on_from(saved.metric_sums)
        return after

    metrics = WorkerMetrics()
    metrics.take(0, 1, {"goals": metric("sum", 3.0), "m": metric("mean", 1.0)})
    metrics.take(0, 2, {"goals": metric("sum", 4.0)})
    metrics.take(0, 1, {"goals": metric("sum", 3.5)})  # a late word of the earlier life
    metrics.take(1, 1, {"goals": metric("sum", 10.0)})
    assert metrics.merged()["goals"].value == 17.0
    metrics = restarted(metrics)
    assert metrics.merged()["goals"].value == 17.0
    assert "m" not in metrics.merged(), "a mean is of workers that live"
    metrics.take(0, 2, {"goals": metric("sum", 5.0)})
    metrics.take(1, 2, {"goals": metric("sum", 1.0)})
    assert metrics.merged()["goals"].value == 19.0
    assert restarted(restarted(metrics)).merged()["goals"].value == 19.0
    same_life, next_life = {"goals": metric("sum", 5.5)}, {"goals": metric("sum", 2.0)}
    assert restarted(metrics, (0, 2, same_life), (1, 3, next_life)).merged()["goals"].value == 21.5


def test_a_fleet_has_a_bounded_number_of_metrics(caplog: pytest.LogCaptureFixture) -> None:
    metrics = WorkerMetrics()
    for slot in range(10):
        metrics.take(slot, 1, {f"{slot}/{n}": metric("sum", 1.0) for n in range(60)})
    assert len(metrics.merged()) == MOST_NAMES
    assert caplog.text.count("is left out") == 1


def test_a_new_broker_leaves_the_sums_in_redis_until_it_has_read_them(url: str, fleet_id: str, client: Any) -> None:
    metrics = {"goals": metric("sum", 3.0)}
    known = WorkerMetrics()
    known.take(0, 1, metrics)
    for report in (Report(metrics=metrics, metric_sums=known.sums()), Report(metric_sums=None)):
        reporter = RedisReporter(url, fleet_id)
        reporter.offer(report)
        assert reporter.close(30.0)
    assert client.hkeys(key_name(fleet_id, METRICS)) == [b"goals"]
