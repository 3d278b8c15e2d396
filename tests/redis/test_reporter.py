"""Reports stay exact through repeats, losses, reordering and crashes, and the broker never waits for Redis."""

from __future__ import annotations

import logging
import random
import signal
import socketserver
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from headrace.broker.files import report_file
from headrace.broker.files.report_file import RedisAway, ReportFile, file_path
from headrace.broker.redis.rows import ReceivedRow
from headrace.broker.reports.report import MergeScript, Part, Report
from headrace.broker.reports.reporter import RedisReporter
from headrace.deploy.monitoring.facts import FactsReader
from headrace.deploy.monitoring.findings import find
from headrace.deploy.report.audit import audit
from headrace.deploy.run.redis_view import FleetView, Snapshot
from headrace.schemas.accounts.consumer_groups import GroupBooks
from headrace.schemas.accounts.folded_lives import FoldedLives
from headrace.schemas.accounts.ledger import LedgerRow
from headrace.schemas.accounts.logged_metrics import LoggedMetric, SumsOfLife
from headrace.schemas.accounts.redis_keys import (
    EVENTS,
    LEASE,
    LEDGER,
    TABLE,
    TOTALS,
    key_name,
)
from headrace.schemas.errors import RedisUnavailableError
from headrace.schemas.messages import LearnerRow
from headrace.schemas.settings.redis_url import read_redis_url
from support.waiting import TIMEOUT_S, wait_until

pytestmark = pytest.mark.processes

MakeRow = Callable[..., LedgerRow]
MakeServer = Callable[..., Any]


def read(url: str, fleet_id: str) -> Snapshot:
    with FleetView(url, fleet_id) as view:
        return view.read()


def received(epoch: int, number: int, **values: float) -> ReceivedRow:
    return ReceivedRow(LearnerRow(epoch=epoch, number=number, values=values or {"loss": 1.0}), 5.0, 100)


def report_once(url: str, fleet_id: str, *reports: Report) -> None:
    reporter = RedisReporter(url, fleet_id)
    for report in reports:
        reporter.offer(report)
    assert reporter.close(30.0)


def fleet_report(make_row: MakeRow, batches: int) -> Report:
    """Two live workers and a dead one, after so many batches each."""
    rows = [make_row(slot, 2, batches, max(0, batches - 3)) for slot in (0, 1)]
    rows.append(make_row(0, 1, 5, 5, closed=True))
    return Report(rows=rows, counters={(slot, 2): {"accepted_bytes_total": 1000 * batches} for slot in (0, 1)})


def test_a_report_is_read_back_as_it_was_written(url: str, fleet_id: str, make_row: MakeRow) -> None:
    row = make_row()
    report = Report(
        rows=[row],
        gauges={"env_steps_per_s": 1234.5, "episode_return_mean": float("nan")},
        workers={0: {"pid": 17, "blocked": "learner"}},
        lease={"epoch": 3, "token": "abc", "since_unix_s": 1.5},
        incarnations={0: 1},
    )
    report_once(url, fleet_id, report)
    snapshot = read(url, fleet_id)
    assert snapshot.rows == {(0, 1): row}
    assert snapshot.gauges == {"env_steps_per_s": 1234.5, "redis_failures": 0.0}
    assert snapshot.workers == {0: {"pid": 17, "blocked": "learner"}}
    assert snapshot.lease == {"epoch": 3, "token": "abc", "since_unix_s": 1.5}
    assert snapshot.incarnations == {0: 1}
    assert snapshot.totals['dropped_agent_steps_total{reason="stale"}'] == 32
    assert snapshot.fleet.balance() == 0


def test_the_reporter_writes_exactly_the_brokers_keys_of_the_table(
    url: str, fleet_id: str, client: Any, make_row: MakeRow
) -> None:
    reporter = RedisReporter(url, fleet_id)
    reporter.offer(fleet_report(make_row, 5))
    reporter.offer(
        Report(
            rows=[make_row()],
            folded={1: FoldedLives(highest=1, row=make_row(1, 0, 5, 5, closed=True))},
            workers={0: {}},
            lease={"epoch": 1},
            incarnations={0: 1},
            runner_state={0: {"num_episodes_lifetime": 1}},
            policies={"one": {"return_mean": 1.0}},
            metrics={"goals": LoggedMetric(reduce="sum", value=1.0)},
            metric_sums={"past": SumsOfLife(sums={"goals": 1.0})},
            env_errors={"others": {"kind": "others", "count": 1}},
            tasks={"newest": "{}"},
            task_figures={"{}": {"episodes": 1.0}},
            groups={
                "record": GroupBooks(
                    rows={(0, 1): make_row()},
                    folded={1: FoldedLives(highest=1, row=make_row(1, 0, 5, 5, closed=True))},
                )
            },
            events=[{"a": 1}],
        )
    )
    reporter.offer_rows([received(1, 1)])
    reporter.offer_weights((1, 1), [b"frame"])
    assert reporter.close(30.0)
    promised = {key_name(fleet_id, key, version="1-1"): key.type for key in TABLE if key.writer == "broker"}
    written = {name.decode(): client.type(name).decode() for name in client.keys(f"headrace:{{{fleet_id}}}:*")}
    assert written == promised


def test_a_report_takes_fewer_than_25_writes_even_with_64_workers(
    fleet_id: str, make_server: MakeServer, make_row: MakeRow
) -> None:
    """A broker reports twice a second, so it writes less than 50 times a second."""

    def report(workers: int, batches: int) -> Report:
        lives = {(slot, 1): {"accepted_bytes_total": 1000 * batches} for slot in range(workers)}
        return Report(
            rows=[make_row(slot, 1, batches, batches - 1) for slot, _ in lives],
            counters=lives,
            gauges={"unix_s": 1.0, **{f"gauge_{n}": n / 8 for n in range(80)}},
            workers={slot: {"pid": slot, "accepted": batches} for slot, _ in lives},
            lease={"epoch": 1},
            incarnations={slot: 1 for slot, _ in lives},
            runner_state={slot: {"num_episodes_lifetime": batches} for slot, _ in lives},
            policies={"one": {"return_mean": 1.0}},
            metrics={"goals": LoggedMetric(reduce="sum", value=1.0)},
            metric_sums={"past": SumsOfLife(sums={"goals": 1.0})},
        )

    server = make_server().start()
    with server.client() as client:
        merge, written = MergeScript(client, fleet_id), {}
        for workers in (2, 64):
            counts = []
            for batches in (5, 6, 7):  # the first report makes the keys, and one may begin an interval of the history
                client.config_resetstat()
                merge(Part(report(workers, batches)), [], 0)
                calls = {name: told["calls"] for name, told in client.info("commandstats").items()}
                counts.append(sum(calls.get(f"cmdstat_{name}", 0) for name in WRITES))
            written[workers] = min(counts)
    assert 5 < written[2] <= written[64] < 25, written
    assert read(server.url, fleet_id).totals["accepted_bytes_total"] == 64 * 7000


def test_repeated_and_reordered_reports_leave_totals_exact(
    url: str, fleet_id: str, client: Any, make_row: MakeRow
) -> None:
    random_ = random.Random(0)
    reports = [fleet_report(make_row, batches) for batches in range(1, 60)]
    calls = reports + [report for report in reports if random_.random() < 0.3]
    late = [(index + random_.randrange(8), call) for index, call in enumerate(calls)]
    merge = MergeScript(client, fleet_id)
    highest = 0
    for _, report in sorted(late, key=lambda pair: pair[0]):
        merge(Part(report), [], 0)
        total = int(client.hget(key_name(fleet_id, TOTALS), "accepted_agent_steps_total"))
        assert total >= highest, "a lifetime counter went back"
        highest = total
    snapshot = read(url, fleet_id)
    assert audit(snapshot) == []
    assert snapshot.totals["accepted_agent_steps_total"] == 32 * (59 + 59 + 5)
    assert snapshot.totals["accepted_bytes_total"] == 2 * 59_000


def test_three_kill_9_without_persistence_leave_totals_exact(
    fleet_id: str, make_server: MakeServer, make_row: MakeRow
) -> None:
    server = make_server("--appendonly", "no").start()
    reporter = RedisReporter(server.url, fleet_id)
    batches = 0
    for _ in range(3):
        for _ in range(20):
            batches += 1
            reporter.offer(fleet_report(make_row, batches))
        wait_until(lambda: reporter.available)
        failures = reporter.failures
        server.kill()
        reporter.offer(fleet_report(make_row, batches))
        wait_until(lambda seen=failures: reporter.failures > seen)
        server.start()
    batches += 1
    reporter.offer(fleet_report(make_row, batches))
    assert reporter.close(30.0)
    snapshot = read(server.url, fleet_id)
    assert audit(snapshot) == []
    assert snapshot.totals["accepted_agent_steps_total"] == 32 * (batches + batches + 5)
    assert snapshot.gauges["redis_failures"] >= 3


def test_a_redis_that_comes_back_empty_is_told_all_lives_again(
    fleet_id: str, make_server: MakeServer, make_row: MakeRow
) -> None:
    server = make_server("--appendonly", "no").start()
    reporter = RedisReporter(server.url, fleet_id)
    reporter.offer(fleet_report(make_row, 20))
    wait_until(lambda: _accepted(server.url, fleet_id))
    server.kill()
    reporter.offer(Report())
    wait_until(lambda: reporter.failures)
    server.start()
    wait_until(lambda: reporter.available)
    reporter.offer(Report())
    assert reporter.close(30.0)
    assert read(server.url, fleet_id).totals["accepted_agent_steps_total"] == 32 * (20 + 20 + 5)


def test_lost_replies_leave_totals_exact(
    shared_server: Any, fleet_id: str, make_proxy: Callable[[int], Any], make_row: MakeRow
) -> None:
    proxy = make_proxy(shared_server.launch.port)
    url = shared_server.url.replace(f":{shared_server.launch.port}/", f":{proxy.port}/")
    reporter = RedisReporter(url, fleet_id)
    for batches in range(1, 9):
        reporter.offer(Report(rows=[make_row(0, 1, batches, 0)], events=[{"kind": "joined", "n": batches}]))
        if batches % 2:
            proxy.losing.set()
            wait_until(lambda seen=proxy.lost: proxy.lost > seen)
            proxy.losing.clear()
        wait_until(lambda want=batches: _accepted(shared_server.url, fleet_id) == 32 * want)
    assert reporter.close(30.0)
    assert proxy.lost >= 4
    assert reporter.failures >= 4
    snapshot = read(shared_server.url, fleet_id)
    assert audit(snapshot) == []
    assert snapshot.totals["accepted_agent_steps_total"] == 32 * 8
    with shared_server.client() as client:
        numbers = [int(fields[b"n"]) for _, fields in client.xrange(key_name(fleet_id, EVENTS))]
    assert numbers == list(range(1, 9)), "an event whose reply was lost must not stand there twice"


def _accepted(url: str, fleet_id: str) -> int:
    return read(url, fleet_id).totals.get("accepted_agent_steps_total", 0)


def test_a_row_with_fewer_settled_batches_and_its_counters_are_not_stored(
    url: str, fleet_id: str, make_row: MakeRow
) -> None:
    report_once(url, fleet_id, Report(rows=[make_row(0, 1, 10, 7)]))
    restarted = Report(
        rows=[make_row(0, 1, 12, 6), make_row(1, 1, 2, 0)], counters={(0, 1): {"accepted_bytes_total": 99}}
    )
    report_once(url, fleet_id, restarted)
    snapshot = read(url, fleet_id)
    assert snapshot.rows[0, 1] == make_row(0, 1, 10, 7)
    assert snapshot.rows[1, 1] == make_row(1, 1, 2, 0)
    assert "accepted_bytes_total" not in snapshot.totals
    assert audit(snapshot) == []
    report_once(url, fleet_id, Report(rows=[make_row(0, 1, 12, 7)], counters={(0, 1): {"accepted_bytes_total": 99}}))
    snapshot = read(url, fleet_id)
    assert snapshot.totals["accepted_agent_steps_total"] == 32 * 14
    assert snapshot.totals["accepted_bytes_total"] == 99
    assert audit(snapshot) == []


def test_a_closed_row_is_never_opened_again(url: str, fleet_id: str, make_row: MakeRow) -> None:
    report_once(url, fleet_id, Report(rows=[make_row(0, 1, 4, 2, closed=True)]))
    report_once(url, fleet_id, Report(rows=[make_row(0, 1, 9, 9)]))
    assert read(url, fleet_id).rows[0, 1].closed
    report_once(url, fleet_id, Report(rows=[make_row(0, 1, 4, 4, closed=True)]))
    snapshot = read(url, fleet_id)
    assert snapshot.rows[0, 1].settled.seq == 4
    assert audit(snapshot) == []


def test_held_batches_of_a_closed_life_can_become_lost_but_not_held_again(
    url: str, fleet_id: str, make_row: MakeRow
) -> None:
    """A broker dies with two accepted batches that no learner has committed. The next broker reports them as lost."""
    held = make_row(0, 1, 4, 2, closed=True)
    gone = {**held.lost, "broker_lost": held.held}
    totals = held.totals.model_copy(update={"module_steps": {}})  # whose steps were lost, nobody knows
    lost = held.model_copy(update={"totals": totals, "accepted": held.settled.total(), "held": (0, 0), "lost": gone})
    for row in (held, lost, held):
        report_once(url, fleet_id, Report(rows=[row]))
    snapshot = read(url, fleet_id)
    assert snapshot.rows[0, 1] == lost
    assert audit(snapshot) == []


def test_lease_and_incarnations_never_go_back(url: str, fleet_id: str) -> None:
    report_once(url, fleet_id, Report(lease={"epoch": 10, "token": "new"}, incarnations={0: 12}))
    report_once(url, fleet_id, Report(lease={"epoch": 9, "token": "old"}, incarnations={0: 9, 1: 1}))
    snapshot = read(url, fleet_id)
    assert snapshot.lease == {"epoch": 10, "token": "new"}
    assert snapshot.incarnations == {0: 12, 1: 1}


def test_gauges_and_workers_that_are_gone_disappear(url: str, fleet_id: str) -> None:
    report_once(url, fleet_id, Report(gauges={"held_batches": 3}, workers={0: {}, 1: {}}))
    report_once(url, fleet_id, Report(gauges={"weights_seq": 4}, workers={1: {}}))
    snapshot = read(url, fleet_id)
    assert snapshot.gauges == {"weights_seq": 4.0, "redis_failures": 0.0}
    assert set(snapshot.workers) == {1}


def test_events_of_a_replaced_report_are_kept(url: str, fleet_id: str, client: Any) -> None:
    reports = [Report(events=[{"kind": "joined", "n": n}]) for n in range(50)]
    report_once(url, fleet_id, *reports)
    report_once(url, fleet_id, Report(events=[{"kind": "lost", "n": 50}]))
    numbers = [int(fields[b"n"]) for _, fields in client.xrange(key_name(fleet_id, EVENTS))]
    assert numbers == list(range(51))


def test_the_saved_state_in_redis_is_handed_over_once(url: str, fleet_id: str, make_row: MakeRow) -> None:
    row = make_row(batches=300, settled=299)
    report = Report(
        rows=[row],
        counters={(0, 1): {"accepted_bytes_total": 5}},
        lease={"epoch": 7, "token": "t"},
        incarnations={0: 1, 3: 2},
    )
    report_once(url, fleet_id, report)
    reporter = RedisReporter(url, fleet_id)
    saved = reporter.take_saved(wait_s=30.0)
    assert saved is not None
    assert saved.rows == {(0, 1): row}
    assert saved.counters[0, 1]["accepted_bytes_total"] == 5
    assert saved.counters[0, 1]["accepted_agent_steps_total"] == 9600
    assert saved.incarnations == {0: 1, 3: 2}
    assert saved.lease_epoch == 7
    assert saved.weights is None
    assert reporter.take_saved() is None
    assert reporter.close(30.0)


def test_reports_reach_a_redis_that_was_down_at_the_start_once_it_is_up(
    fleet_id: str, make_server: MakeServer, make_row: MakeRow, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "headrace.broker.reports.reporter")
    server = make_server()
    reporter = RedisReporter(server.url, fleet_id)
    for batches in range(1, 100):
        reporter.offer(fleet_report(make_row, batches))
    wait_until(lambda: reporter.failures >= 3)
    assert not reporter.available
    assert reporter.take_saved() is None
    server.start()
    wait_until(lambda: reporter.available)
    assert reporter.close(30.0)
    assert read(server.url, fleet_id).totals["accepted_bytes_total"] == 2 * 99_000
    away = [record for record in caplog.records if "is away" in record.message]
    back = [record for record in caplog.records if "is back" in record.message]
    assert len(away) == len(back) == 1, "an outage is logged once"
    password = server.url.split(":")[2].split("@")[0]
    assert password not in caplog.text


def test_offers_return_while_redis_is_stopped_and_the_newest_arrives_afterwards(
    fleet_id: str, make_server: MakeServer, make_row: MakeRow
) -> None:
    server = make_server().start()
    reporter = RedisReporter(server.url, fleet_id)
    reporter.offer(fleet_report(make_row, 1))
    wait_until(lambda: _accepted(server.url, fleet_id))
    server.signal(signal.SIGSTOP)
    # Redis goes on only after all of these have returned: if one waited for it, this test would never end.
    for batches in range(2, 500):
        reporter.offer(fleet_report(make_row, batches))
        reporter.offer_weights((1, batches), [bytes(100)])
        assert reporter.take_saved() is None or batches == 2
    wait_until(lambda: reporter.failures >= 2)
    server.signal(signal.SIGCONT)
    wait_until(lambda: reporter.available)
    assert reporter.close(30.0)
    snapshot = read(server.url, fleet_id)
    assert snapshot.totals["accepted_bytes_total"] == 2 * 499_000
    assert audit(snapshot) == []


def test_close_returns_false_while_redis_is_stopped(fleet_id: str, make_server: MakeServer, make_row: MakeRow) -> None:
    server = make_server().start()
    server.signal(signal.SIGSTOP)
    reporter = RedisReporter(server.url, fleet_id)
    reporter.offer(fleet_report(make_row, 1))
    assert not reporter.close(0.1)
    server.signal(signal.SIGCONT)


def read_only(server: Any, client: Any) -> Callable[[], object]:
    client.execute_command("REPLICAOF", "127.0.0.1", "1")
    return lambda: client.execute_command("REPLICAOF", "NO", "ONE")


def out_of_memory(server: Any, client: Any) -> Callable[[], object]:
    client.config_set("maxmemory", "1000")
    return lambda: client.config_set("maxmemory", "0")


def failed_snapshot(server: Any, client: Any) -> Callable[[], object]:
    Path(client.config_get("dir")["dir"], "dump.rdb", "in the way").mkdir(parents=True)
    client.config_set("save", "3600 1")
    client.bgsave()
    return lambda: client.config_set("stop-writes-on-bgsave-error", "no")


@pytest.mark.parametrize("refuse", [read_only, out_of_memory, failed_snapshot])
def test_refused_writes_count_as_an_outage_of_redis(
    refuse: Callable[[Any, Any], Callable[[], object]],
    fleet_id: str,
    make_server: MakeServer,
    make_row: MakeRow,
) -> None:
    server = make_server("--appendonly", "no").start()
    reporter = RedisReporter(server.url, fleet_id)
    reporter.offer(fleet_report(make_row, 1))
    wait_until(lambda: _accepted(server.url, fleet_id))
    with server.client() as client:
        allow = refuse(server, client)
        if refuse is failed_snapshot:
            wait_until(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err")
        reporter.offer(fleet_report(make_row, 2))
        wait_until(lambda: reporter.failures >= 2)
        assert not reporter.available
        assert audit(read(server.url, fleet_id)) == [], "a refused report must not be half written"
        allow()
    wait_until(lambda: reporter.available)
    assert reporter.close(30.0)
    snapshot = read(server.url, fleet_id)
    assert snapshot.totals["accepted_bytes_total"] == 4000
    assert audit(snapshot) == []


def gone(server: Any, client: Any) -> Callable[[], object]:
    server.kill()
    return lambda: server.start()


@pytest.mark.parametrize("refuse", [read_only, out_of_memory, gone])
def test_while_redis_is_away_a_file_tells_what_redis_would_hold(
    refuse: Callable[[Any, Any], Callable[[], object]],
    fleet_id: str,
    make_server: MakeServer,
    make_row: MakeRow,
    tmp_path: Path,
) -> None:
    server, file = make_server().start(), file_path(tmp_path)
    live_s = 4 * TIMEOUT_S  # nothing expires while the test waits
    reporter = RedisReporter(server.url, fleet_id, live_s=live_s, report_file=ReportFile(tmp_path, fleet_id, live_s))
    books = replace(
        fleet_report(make_row, 1),
        gauges={"env_steps_per_s": 12.5},
        workers={0: {"pid": 17}},
        lease={"epoch": 3, "connected": 1},
        folded={5: FoldedLives(highest=1, row=make_row(5, 0, 5, 5, closed=True))},
        metric_sums={},
        metrics={"loss": LoggedMetric(reduce="mean", value=0.5)},
    )
    reporter.offer(books)
    wait_until(lambda: _accepted(server.url, fleet_id))
    with server.client() as client, FleetView(server.url, fleet_id, tmp_path) as view:
        before = view.read()
        assert before.away is None
        assert not file.exists()
        allow = refuse(server, client)
        reporter.offer(replace(books, rows=fleet_report(make_row, 9).rows, folded={}, joins_blocked="no descriptor"))
        reporter.offer_rows([received(3, 1)])
        wait_until(lambda: file.exists() and view.read().rows.get((0, 2)) == make_row(0, 2, 9, 6))
        told = view.read()
        assert told.away is not None
        assert told.away.reason
        assert audit(told) == []
        assert told.joins_blocked == "no descriptor"
        assert view.learner_rows() == [view.newest_learner_row()]
        assert view.learner_rows((3, 1)) == []
        allow()
        wait_until(lambda: not file.exists())
        after = view.read()
    assert reporter.close(30.0)
    assert after.away is None
    own = {"away": told.away, "reported_unix_s": told.reported_unix_s, "started_unix_s": told.started_unix_s}
    gauges = {name: value for name, value in after.gauges.items() if name != "redis_failures"}
    assert replace(after, gauges=gauges, **own) == told


def test_the_file_is_there_too_while_the_supervisor_alone_cannot_reach_redis(
    url: str, fleet_id: str, make_row: MakeRow, tmp_path: Path
) -> None:
    file, of_supervisor = file_path(tmp_path), tmp_path / "fleet.json"
    reporter = RedisReporter(url, fleet_id, report_file=ReportFile(tmp_path, fleet_id, 15.0))
    of_supervisor.write_text('{"redis_away_unix_s": 50.0}')
    reporter.offer(Report(rows=[make_row()]))
    wait_until(file.exists)
    with FleetView("redis://127.0.0.1:1/0", fleet_id, tmp_path) as cut_off, FleetView(url, fleet_id, tmp_path) as view:
        told = cut_off.read()
        assert (told.rows, told.away and told.away.since_unix_s) == ({(0, 1): make_row()}, 50.0)
        assert view.read().away is None
    of_supervisor.write_text('{"redis_away_unix_s": null}')
    reporter.offer(Report(rows=[make_row()]))
    wait_until(lambda: not file.exists())
    assert reporter.close(30.0)


@pytest.mark.parametrize(("refuse", "why"), [(read_only, "it is a read-only replica"), (out_of_memory, "maxmemory")])
def test_a_redis_that_refuses_writes_is_told_by_its_address_alone(
    refuse: Callable[[Any, Any], Callable[[], object]],
    why: str,
    fleet_id: str,
    make_server: MakeServer,
    make_row: MakeRow,
) -> None:
    server = make_server().start()
    report_once(server.url, fleet_id, Report(rows=[make_row()], gauges={"env_steps_per_s": 1.0}))
    with server.client() as client, FactsReader(redis_url=server.url, fleet_id=fleet_id) as reader:
        assert reader.read().redis_refusal == ""
        allow = refuse(server, client)
        facts = replace(reader.read(), unix_s=time.time() + 30.0)
        assert why in facts.redis_refusal
        found = find(replace(facts, snapshot=replace(facts.snapshot, gauges={})))
        assert [one.kind for one in found] == ["redis_away"]
        assert "the broker may be well" in found[0].sentence
        allow()
        assert reader.read().redis_refusal == ""


def test_the_last_report_does_not_wait_for_the_pause_of_the_file(
    fleet_id: str, make_row: MakeRow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_file, "_BYTES_PER_S", 1e-3)
    nowhere = "redis://127.0.0.1:1/0"
    reporter = RedisReporter(nowhere, fleet_id, report_file=ReportFile(tmp_path, fleet_id, 15.0))
    reporter.offer(fleet_report(make_row, 1))
    wait_until(file_path(tmp_path).exists)
    reporter.offer(fleet_report(make_row, 9))
    wait_until(lambda: not reporter._offered)
    assert not reporter.close(0.0)
    with FleetView(nowhere, fleet_id, tmp_path) as view:
        assert view.read().rows[0, 2] == make_row(0, 2, 9, 6)


def test_a_report_counts_as_newer_in_the_file_only_from_the_next_ms(
    url: str, fleet_id: str, make_row: MakeRow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.broker.reports.reporter.time.time", lambda: 1_795_280_623.4123)
    (tmp_path / "fleet.json").write_text('{"redis_away_unix_s": 50.0}')
    reporter = RedisReporter(url, fleet_id, report_file=ReportFile(tmp_path, fleet_id, 15.0))
    reporter.offer(Report(rows=[make_row()]))
    wait_until(file_path(tmp_path).exists)
    with FleetView(url, fleet_id, tmp_path) as view:
        assert view.read().away is None
    reporter.close(30.0)


def test_a_file_that_an_earlier_broker_left_counts_only_while_it_is_newer_than_redis(
    url: str, fleet_id: str, make_row: MakeRow, tmp_path: Path
) -> None:
    left, hashes = ReportFile(tmp_path, fleet_id, 15.0), {"totals": {"env_steps_total": "7"}, "gauges": {"unix_s": "1"}}
    left.write(RedisAway(50.0, "refused"), 60.0, hashes, [])
    with FleetView(url, fleet_id, tmp_path) as view:
        old = view.read()
        assert (old.totals, old.gauges) == ({"env_steps_total": 7}, {}), "the last gauges of a broker expire"
        report_once(url, fleet_id, Report(rows=[make_row()]))
        assert view.read().away is None
        assert view.read().rows == {(0, 1): make_row()}
    with FleetView("redis://127.0.0.1:1/0", "another", tmp_path) as other, pytest.raises(RedisUnavailableError):
        other.read()


@pytest.mark.parametrize("user", ["", "writer"])
def test_a_password_that_is_replaced_in_its_file_is_read_again(
    fleet_id: str, make_server: MakeServer, make_row: MakeRow, tmp_path: Path, user: str
) -> None:
    server, file = make_server().start(), tmp_path / "writer.url"
    file.touch(mode=0o600)

    def rotate(password: str) -> None:
        with server.client() as client:
            client.execute_command(
                "ACL", "SETUSER", user or "default", "on", "resetpass", f">{password}", "+@all", "~*"
            )
            client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        server.url = server.url if user else f"redis://:{quote(password, safe='')}@127.0.0.1:{server.launch.port}/0"

    def note(password: str) -> None:
        file.write_text(f"redis://{user}:{quote(password, safe='')}@127.0.0.1:{server.launch.port}/0\n")

    rotate("be/fore")
    note("be/fore")
    reporter = RedisReporter(read_redis_url(str(file)), fleet_id)
    reporter.offer(fleet_report(make_row, 1))
    wait_until(lambda: _accepted(server.url, fleet_id))
    with FleetView(read_redis_url(str(file)), fleet_id) as view:
        assert view.read().rows
        rotate("af@ter")
        reporter.offer(fleet_report(make_row, 2))
        wait_until(lambda: reporter.failures >= 2)
        with pytest.raises(RedisUnavailableError) as caught:
            view.read()
        assert "fore" not in str(caught.value)
        note("af@ter")
        wait_until(lambda: reporter.is_idle)
        assert view.read().totals["accepted_bytes_total"] == 4000
    assert reporter.close(30.0)


def test_a_wrong_password_counts_as_an_outage_of_redis(url: str, fleet_id: str) -> None:
    reporter = RedisReporter(url.replace("redis://:", "redis://:x"), fleet_id)
    wait_until(lambda: reporter.failures >= 2)
    reporter.close(0.1)
    with pytest.raises(RedisUnavailableError, match=r"(?i)password"):
        read(url.replace("redis://:", "redis://:x"), fleet_id)


def test_an_invalid_url_is_refused_at_once() -> None:
    with pytest.raises(RedisUnavailableError, match="not a Redis URL"):
        RedisReporter("localhost", "fleet")


WRITES = ("hset", "hdel", "del", "xadd", "pexpire", "set", "unlink")


def test_a_value_that_is_no_row_is_left_out_and_logged(
    url: str, fleet_id: str, client: Any, make_row: MakeRow, caplog: pytest.LogCaptureFixture
) -> None:
    report_once(url, fleet_id, Report(rows=[make_row()], lease={"epoch": 5}, incarnations={0: 1}))
    client.hset(key_name(fleet_id, LEDGER), mapping={"7/1": b"{", "x": b'{"slot": 0}', "8/1": b"\xff\xfe"})
    client.hset(key_name(fleet_id, LEASE), "since_unix_s", b"nan")
    saved = RedisReporter(url, fleet_id).take_saved(wait_s=30.0)
    assert saved is not None
    assert (saved.rows, saved.lease_epoch) == ({(0, 1): make_row()}, 5)
    assert "left out a value in Redis" in caplog.text
    snapshot = read(url, fleet_id)
    assert (snapshot.rows, len(snapshot.garbage)) == ({(0, 1): make_row()}, 4)
    assert any("lease" in sentence for sentence in snapshot.garbage)


@pytest.mark.parametrize("answer", [b":1", b"$abc", b":" + b"9" * 5000, b"*1\r\n" * 20_000 + b":1"])
def test_a_server_that_answers_what_no_redis_would_counts_as_an_outage(
    answer: bytes, fleet_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Answers(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            while asked := self.request.recv(1 << 16):
                self.request.sendall((answer + b"\r\n") * asked.count(b"*"))

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Answers) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"redis://127.0.0.1:{server.server_address[1]}/0"
        reporter = RedisReporter(url, fleet_id)
        wait_until(lambda: reporter.failures > 1, "a second try")
        reporter.close(0.1)
        with pytest.raises(RedisUnavailableError, match="it answers what no Redis would"):
            read(url, fleet_id)
        server.shutdown()
    assert caplog.text.count("it answers what no Redis would") == 1
