"""The document that the page and `top` show, and the curves, compared with a real Redis."""

from __future__ import annotations

import json
import os
import platform
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import orjson
import pytest

from headrace.broker.batches.limits import BrokerLimits
from headrace.broker.redis.rows import ReceivedRow
from headrace.broker.reports.env_error_totals import EnvErrors
from headrace.broker.reports.metrics import FleetMetrics
from headrace.broker.reports.report import MergeScript, Part, Report
from headrace.broker.reports.reporter import RedisReporter
from headrace.broker.sessions.core import BrokerCore
from headrace.deploy.annexes.watch.exporter.metrics_text import metrics_text
from headrace.deploy.annexes.watch.state.fleet_state import SlowFacts, StateReader, cpu_shares, fleet_state, ledger
from headrace.deploy.annexes.watch.state.series import SeriesReader
from headrace.deploy.monitoring.facts import Facts, FactsReader
from headrace.deploy.monitoring.findings import find, verdict
from headrace.deploy.monitoring.losses import LOSSES
from headrace.deploy.monitoring.process_reporter import FleetLease, ProcessReporter
from headrace.deploy.report.summary import SUMMARY_FILE
from headrace.deploy.run.fleet_file import FleetFile
from headrace.deploy.run.redis_view import FleetView, Snapshot
from headrace.schemas.accounts import redis_keys as keys
from headrace.schemas.accounts.env_errors import EnvErrorGroup
from headrace.schemas.accounts.lag_buckets import LAG_LABELS, lag_quantiles
from headrace.schemas.accounts.ledger import Discard, Drop, FleetLedger, LedgerRow
from headrace.schemas.accounts.process_state import ProcessState
from headrace.schemas.basics.process_usage import usage_of
from headrace.schemas.errors import ExitCode
from headrace.schemas.messages import LearnerRow
from headrace.schemas.settings.config import FleetConfig, SamplingSection
from support.fleets.running_fleet import RunningFleet
from support.waiting import wait_until

MakeRow = Callable[..., LedgerRow]
START = 1_795_280_000.0


def test_the_document_has_every_number_of_redis(url: str, client: Any, fleet_id: str, make_row: MakeRow) -> None:
    gauges = {"env_steps_per_s": 41230.5, "held_batches": 3.0, "learner_epoch": 2.0}
    hosts = {"connected": 1, "wanted": 2, "versions": ["0.1.0"]}
    told = {
        0: {"incarnation": 2, "weights_behind": 3, "blocked": True, "env_hosts": hosts},
        1: {"incarnation": 1, "weights_behind": 1},
    }
    rows = [make_row(0, 1, 5, 5, closed=True), make_row(0, 2, 10, 7), make_row(1, 1, 4, 2)]
    lease = {"epoch": 2, "token": "secret", "connected": 1, "since_unix_s": START}
    failures = EnvErrors()
    for at, kind in enumerate(("env_hang", "env_crash")):
        group = EnvErrorGroup(kind=kind, message="\x1b[2J", traceback="a\n\x1b", last_unix_s=START + at)
        failures.take(at, 1, group, START + 10)
    errors = failures.rows()
    report = Report(rows=rows, gauges=gauges, workers=told, incarnations={0: 2, 1: 1}, lease=lease, env_errors=errors)
    MergeScript(client, fleet_id)(Part(report), [], 0)
    with FactsReader(redis_url=url, fleet_id=fleet_id) as reader:
        state = json.loads(orjson.dumps(StateReader(reader).read()))
    raw = {
        **client.hgetall(keys.key_name(fleet_id, keys.TOTALS)),
        **client.hgetall(keys.key_name(fleet_id, keys.GAUGES)),
    }
    for field, value in raw.items():
        name, label, text = keys.unlabelled(field.decode())
        assert (state["labelled"][name][text] if label else state["numbers"][name]) == float(value), field
    books = state["ledger"]
    assert books["stepped"] == int(raw[b"agent_steps_total"])
    assert books["committed"] == int(raw[b"committed_agent_steps_total"])
    assert books["stepped"] == books["committed"] + books["queued"] + books["undelivered"]
    assert books["queued"] == books["with_workers"] + books["with_broker_or_learner"] > 0
    assert all(loss["meaning"] and loss["agent_steps"] for loss in books["losses"])
    assert {loss["reason"] for loss in books["losses"]} == {"env_exception", "oversize", "stale", "worker_killed"}
    assert [worker["ledger"]["stepped"] for worker in state["workers"]] == [
        sum(row.totals.stepped for row in rows if row.slot == slot) for slot in (0, 1)
    ]
    assert state["numbers"]["weights_lag"] == 3
    assert (state["numbers"]["workers_connected"], state["numbers"]["workers_blocked_now"]) == (2, 1)
    assert state["workers"][0]["env_hosts"] == hosts
    assert state["learner"]["is_connected"]
    assert "secret" not in orjson.dumps(state).decode()
    assert [(one["kind"], one["fingerprint"] in errors, one["slots"]) for one in state["errors"]] == [
        ("env_crash", True, [1]),
        ("env_hang", True, [0]),
    ]
    assert (state["errors"][0]["message"], state["errors"][0]["traceback"]) == (r"\x1b[2J", "a\n\\x1b")
    assert state["redis"]["server"]["used_memory"] > 0


def test_during_a_redis_outage_the_old_numbers_stay_and_are_marked_as_old(
    make_server: Callable[..., Any], fleet_id: str, make_row: MakeRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.deploy.annexes.watch.state.fleet_state.STALE_S", -1.0)
    server = make_server().start()
    MergeScript(server.client(), fleet_id)(Part(Report(rows=[make_row()], gauges={"held_batches": 3.0})), [], 0)
    with FactsReader(redis_url=server.url, fleet_id=fleet_id) as reader:
        states = StateReader(reader)
        before = states.read()
        assert not before["redis"]["is_old"]
        server.kill()
        state = states.read()
    assert state["redis"]["is_old"]
    assert state["redis"]["error"]
    assert state["redis"]["away_since_unix_s"] <= state["unix_s"]
    assert state["severity"] == "error"
    for part in ("numbers", "labelled", "ledger"):
        assert state[part] == before[part]


def test_a_machine_with_redis_alone_finds_what_settings_and_the_disk_tell(
    url: str, client: Any, fleet_id: str, make_row: MakeRow
) -> None:
    config = FleetConfig(sampling=SamplingSection(env_placement="remote"))
    settings = orjson.dumps({key: config.value_of(key) for key in keys.TOLD_SETTINGS}).decode()
    hostless = {"incarnation": 1, "weights_seq": 1, "env_silence_s": 15.0, "env_hosts": {"connected": 0, "wanted": 1}}
    worker = hostless | {"pid": 7, "host": "box", "unix_s": time.time()}
    report = Report(rows=[make_row(0, 1)], workers={0: worker}, lease={"epoch": 1, "connected": 1})
    MergeScript(client, fleet_id, about={"settings": settings})(Part(report), [], 0)
    supervisor = ProcessState(name="supervisor", role="supervisor", host="there", pid=9, disk_free_bytes=1 << 20)
    client.hset(keys.key_name(fleet_id, keys.PROCESSES), "supervisor", supervisor.model_dump_json())
    with FactsReader(redis_url=url, fleet_id=fleet_id) as reader:
        facts = reader.read()
        found = {one.kind: (one.sentence, one.limit) for one in find(facts)}
    assert facts.snapshot.garbage == ()
    assert found == {
        "disk_full": (
            "waiting for room on the disk of the run directory on there, which is full: 1.0 MiB are left",
            "fleet.run_dir",
        ),
        "no_env_hosts": (
            "waiting for worker-0 (pid 7 on box): no env host serves its envs, for 15 s",
            'sampling.env_placement = "remote"',
        ),
    }


def test_an_end_that_redis_tells_before_fleet_json_is_told_with_its_error(
    url: str, client: Any, fleet_id: str, tmp_path: Path
) -> None:
    drains = FleetFile(fleet_id=fleet_id, redis_url=url, state="draining", supervisor_pid=os.getpid())
    drains.write(tmp_path / "fleet.json")
    (tmp_path / SUMMARY_FILE).write_bytes(orjson.dumps({"error": "the goal was not reached"}))
    MergeScript(client, fleet_id)(Part(Report(ended_unix_s=time.time())), [], 0)
    with FactsReader(tmp_path) as reader:
        assert reader.read().failure == ""
        ended = ProcessState(name="supervisor", role="supervisor", host=platform.node(), state="stopped")
        client.hset(keys.key_name(fleet_id, keys.PROCESSES), "supervisor", ended.model_dump_json())
        last = reader.read()
        assert verdict(last, find(last)).startswith("Ended with an error: the goal was not reached.")


def test_the_end_of_an_earlier_start_in_redis_does_not_end_a_start(
    url: str, client: Any, fleet_id: str, tmp_path: Path
) -> None:
    starts = FleetFile(fleet_id=fleet_id, redis_url=url, supervisor_pid=os.getpid(), started=200.0)
    starts.write(tmp_path / "fleet.json")
    ended = ProcessState(
        name="supervisor", role="supervisor", host=platform.node(), state="stopped", started_unix_s=100.0
    )
    client.hset(keys.key_name(fleet_id, keys.PROCESSES), "supervisor", ended.model_dump_json())
    with FactsReader(tmp_path) as reader:
        assert reader.read().processes["supervisor"].state == "starting"


@pytest.mark.parametrize("told", ["[]", "{"])
def test_settings_in_redis_that_are_no_table_are_named_and_left_out(
    url: str, client: Any, fleet_id: str, told: str
) -> None:
    MergeScript(client, fleet_id, about={"settings": told})(Part(Report()), [], 0)
    with FleetView(url, fleet_id) as view:
        snapshot = view.read()
    assert snapshot.settings == {}
    [sentence] = snapshot.garbage
    assert sentence.startswith("fleet: field b'settings' holds")


def test_the_three_kinds_of_messages_refused_most_are_in_redis(url: str, client: Any, fleet_id: str) -> None:
    core = BrokerCore(fleet_id, BrokerLimits())
    for peer, kind, count in (("a", "late", 1), ("b" * 300, "late", 4), ("a", "bad", 2), ("c", "bad", 3)):
        for _ in range(count):
            core.refusals.note(peer, kind, "")
    MergeScript(client, fleet_id)(Part(FleetMetrics(core).report(0.0)), [], 0)
    with FleetView(url, fleet_id) as view:
        assert view.read().refused == [("b" * 200, "late", 4), ("c", "bad", 3), ("a", "bad", 2)]
        for wrong in ("{", '[["a", "b"]]', '[["a", "b", -1]]', '[["a", 1, 1]]'):
            client.hset(keys.key_name(fleet_id, keys.FLEET), "refused", wrong)
            snapshot = view.read()
            assert (snapshot.refused, len(snapshot.garbage)) == ([], 1)


def test_each_loss_reason_has_a_meaning_and_unknown_reasons_are_shown() -> None:
    assert set(LOSSES) == {f"discarded/{one}" for one in Discard} | {f"dropped/{one}" for one in Drop}
    books = ledger(FleetLedger(stepped=12, discarded={"new": 5, "reset": 0}, dropped={"newer": (7, 1)}))
    assert [(loss["kind"], loss["reason"], loss["agent_steps"]) for loss in books["losses"]] == [
        ("dropped", "newer", 7),
        ("discarded", "new", 5),
    ]


def test_restarts_by_role_add_up_over_supervisors_and_a_flushed_redis(url: str, client: Any, fleet_id: str) -> None:
    restarts = {"worker-0": 2, "worker-1": 1, "broker": 0}

    def states() -> dict[str, ProcessState]:
        return {
            name: ProcessState(name=name, role=name.partition("-")[0], restarts=count)
            for name, count in restarts.items()
        }

    def totals() -> dict[str, int]:
        with FleetView(url, fleet_id) as view:
            return {keys.unlabelled(name)[2]: count for name, count in view.read().supervisor_totals.items()}

    ProcessReporter(url, fleet_id, states).close()
    assert totals() == {"worker": 3, "broker": 0}
    restarts.update({"worker-0": 1, "broker": 4})  # under another supervisor
    del restarts["worker-1"]
    reporter = ProcessReporter(url, fleet_id, states)
    wait_until(lambda: totals() == {"worker": 4, "broker": 4}, "the restarts of both")
    client.delete(keys.key_name(fleet_id, keys.SUPERVISOR_TOTALS))
    del restarts["worker-0"]  # the fleet shrinks
    reporter.close()
    assert totals() == {"worker": 4, "broker": 4}
    with FactsReader(redis_url=url, fleet_id=fleet_id) as reader:
        assert StateReader(reader).read()["labelled"]["restarts_total"] == {"worker": 4, "broker": 4}
        shown = metrics_text({fleet_id: reader.read()})[0].decode()
    assert f'headrace_restarts_total{{fleet="{fleet_id}",role="worker"}} 4.0' in shown


def test_workers_are_wanted_as_configured_or_as_asked_for_since_also_on_ray(tmp_path: Path) -> None:
    facts = Facts(
        START, Snapshot(fleet_id="f"), config=FleetConfig.model_validate({"fleet": {"workers": 2}}), run_dir=tmp_path
    )

    def wanted() -> tuple[Any, bool]:
        shown = fleet_state(facts, [])["fleet"]["workers_wanted"]
        return shown, f'headrace_workers_wanted{{fleet="f"}} {shown}.0' in metrics_text({"f": facts})[0].decode()

    assert wanted() == (2, True)
    (tmp_path / "workers.json").write_bytes(b'{"workers":8}')
    assert wanted() == (8, True)
    (tmp_path / "ray.json").write_bytes(b'{"workers":3}')
    assert wanted() == (11, True)


def test_a_worker_from_elsewhere_shows_the_usage_that_it_tells_and_an_own_one_what_its_supervisor_sees() -> None:
    told = {"cpu_share": 0.25, "rss_bytes": 1000}
    own = ProcessState(name="worker-0", role="worker", slot=0, pid=7, rss_bytes=5000)
    facts = Facts(START, Snapshot(fleet_id="f", workers={0: told, 9: told}), processes={"worker-0": own})
    found = fleet_state(facts, [], SlowFacts(cpu_shares={"worker-0": 0.5}))["workers"]
    assert {one["slot"]: (one["cpu_share"], one["rss_bytes"]) for one in found} == {0: (0.5, 5000), 9: (0.25, 1000)}


@pytest.mark.parametrize(
    ("state", "age_s", "nbytes"), [("running", 60.0, 5000), ("stopped", None, 0), ("gone", None, 0)]
)
def test_processes_that_have_ended_grow_no_older_and_have_no_memory(state: str, age_s: Any, nbytes: int) -> None:
    usual: dict[str, Any] = {"state": state, "started_unix_s": START - 60, "rss_bytes": nbytes}
    processes = {
        "supervisor": ProcessState(name="supervisor", role="supervisor", pid=6, **usual),
        "worker-0": ProcessState(name="worker-0", role="worker", slot=0, **usual),
    }
    found = fleet_state(Facts(START, Snapshot(fleet_id="f"), processes=processes), [], SlowFacts())
    assert [one["age_s"] for one in found["processes"]] == [age_s, age_s]
    assert [one["rss_bytes"] for one in found["workers"]] == [nbytes or None]


def test_broker_learner_and_redis_from_elsewhere_have_rows_with_what_they_tell_themselves() -> None:
    gauges = {
        keys.labelled(f"process_{name}", "role", role): value
        for role, told in {"broker": (0.5, 1000), "learner": (2.0, -1), "<script>": (1.0, 1)}.items()
        for name, value in zip(("cpu_share", "rss_bytes"), told, strict=True)
    }
    own = ProcessState(name="broker", role="broker", pid=7, rss_bytes=5000)
    slow = SlowFacts(server={"used_memory_rss": 9000}, cpu_shares={"broker": 0.75})
    for processes, of_broker in (({}, (0.5, 1000, 0)), ({"broker": own}, (0.75, 5000, 7))):
        found = fleet_state(Facts(START, Snapshot(fleet_id="f", gauges=gauges), processes=processes), [], slow)
        rows = {one["name"]: (one["cpu_share"], one["rss_bytes"], one["pid"]) for one in found["processes"]}
        assert rows == {"broker": of_broker, "learner": (2.0, 0, 0), "redis": (None, 9000, 0)}


def test_the_reader_measures_the_memory_of_a_redis_that_no_supervisor_started(
    url: str, client: Any, fleet_id: str
) -> None:
    MergeScript(client, fleet_id)(Part(Report(gauges={"env_steps_per_s": 1.0})), [], 0)
    with FactsReader(redis_url=url, fleet_id=fleet_id) as reader:
        row = {one["name"]: one for one in StateReader(reader).read()["processes"]}["redis"]
    assert (used := usage_of(client.info()["process_id"])) is not None
    assert row["rss_bytes"] == pytest.approx(used[1], rel=0.3)


def test_cpu_shares_omit_a_process_that_was_restarted() -> None:
    before = {name: ProcessState(name=name, role="worker", pid=7, cpu_s=1.0, unix_s=10.0) for name in ("a", "b")}
    after = {
        "a": ProcessState(name="a", role="worker", pid=7, cpu_s=3.5, unix_s=15.0),
        "b": ProcessState(name="b", role="worker", pid=8, cpu_s=0.5, unix_s=15.0),
    }
    assert cpu_shares(before, after) == {"a": 0.5}
    assert cpu_shares(after, after) == {}


class Clock:
    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        return self.now


def test_curves_have_counter_rates_gaps_and_the_learners_logged_values(
    url: str, client: Any, fleet_id: str, make_row: MakeRow
) -> None:
    clock = Clock()
    merge = MergeScript(client, fleet_id, clock=clock)
    event = ["event", "joined", "slot", "0"]
    with FleetView(url, fleet_id) as view:
        reader = SeriesReader(view)
        for seconds, batches in ((0, 7), (5, 8), (5, 10), (60, 12), (5, 12)):
            clock.now += seconds
            merge(Part(Report(rows=[make_row(0, 1, batches, batches)], gauges={"held_batches": 1.0})), [], 0)
            reader.read()
        merge(Part(Report()), [(1, event), (2, [*event[:3], "1"]), (3, ["event", "lost", "slot", "1"])], 0)
        reporter = RedisReporter(url, fleet_id)
        times = enumerate((START + 6, START + 9, START + 11), start=1)
        reporter.offer_rows(
            [
                ReceivedRow(LearnerRow(epoch=1, number=n, weights_seq=n, values={"loss": n / 8}), at, 0)
                for n, at in times
            ]
        )
        assert reporter.close(30.0)
        reader.read()
        series = reader.series()
        assert list(series.unix_s) == [START + s for s in (0, 5, 10, 15, 20, 70, 75)], "20 ends the line"
        committed = [32 * (batches - 1) for batches in (7, 8, 10)]
        assert series.curves["committed_agent_steps_total"][:3] == committed
        assert series.curves["committed_agent_steps_per_s"] == [None, 32 / 5, 64 / 5, None, None, None, 0.0]
        assert series.curves["learner/loss"] == [None, None, 0.25, 0.375, None, None, None]
        assert [(mark.kind, mark.sentence, mark.count) for mark in series.marks] == [
            ("joined", "2 workers: joined", 2),
            ("lost", "worker 1: lost the connection", 1),
        ]
        late = reader.series(START + 70, ["committed"])
        assert list(late.unix_s) == [START + 75]
        assert late.curves["committed_agent_steps_per_s"] == [0.0]
        assert "held_batches" not in late.curves
        fresh = SeriesReader(view)
        fresh.read()
        assert fresh.series() == series, "a page that was started later shows the same"


def test_a_counter_that_redis_lost_makes_no_negative_rate(
    url: str, client: Any, fleet_id: str, make_row: MakeRow
) -> None:
    clock = Clock()
    with FleetView(url, fleet_id) as view:
        reader = SeriesReader(view)
        for batches in (9, 3, 4):
            merge = MergeScript(client, fleet_id, clock=clock)
            merge(Part(Report(rows=[make_row(0, 1, batches, batches)])), [], 0)
            reader.read()
            clock.now += 5
            client.delete(keys.key_name(fleet_id, keys.TOTALS), keys.key_name(fleet_id, keys.SOURCES))
            client.delete(keys.key_name(fleet_id, keys.LEDGER))
        assert reader.series().curves["committed_agent_steps_per_s"] == [None, None, 32 / 5]


def test_lag_quantiles_cover_the_steps_between_two_readings() -> None:
    def counts(*steps: int) -> dict[str, float]:
        return {keys.labelled(keys.ACCEPTED_LAG, "le", le): n for le, n in zip(LAG_LABELS, steps, strict=True)}

    before, now = counts(*[100] * 9), counts(100, 130, 160, 190, 196, 196, 196, 196, 200)
    assert lag_quantiles(keys.ACCEPTED_LAG, before, now, (0.3, 0.5, 0.95, 1.0)) == {0.3: 1, 0.5: 2, 0.95: 8, 1.0: 64}
    assert lag_quantiles(keys.ACCEPTED_LAG, now, before, (0.5,)) == {0.5: 0}, "another broker counts from 0"
    assert lag_quantiles(keys.ACCEPTED_LAG, now, now, (0.5,)) == {}
    assert lag_quantiles(keys.ACCEPTED_LAG, {}, {}, (0.5,)) == {}


def test_a_second_fleet_of_one_name_is_refused_until_the_first_gives_it_back_or_is_gone(url: str, client: Any) -> None:
    name = f"fleet-{uuid4().hex}"
    first, second = (FleetLease(url, name, run) for run in ("node-7 /runs/a", "node-7 /runs/b"))
    again = FleetLease(url, name, "node-7 /runs/a")
    assert first.take()
    assert not second.take()
    assert not second.take(), "it waits: the first one may be dead"
    assert re.search(r"fleet of another `headrace up` at Redis .*/runs/a", str(second.refusal))
    assert again.take(), "the lock of the run directory shows that its earlier supervisor is dead"
    third = FleetLease(url, name, "node-7 /runs/c")
    assert not third.take()
    client.delete(keys.key_name(name, keys.HOLDER))  # as when the lease is over
    assert third.take()
    assert third.refusal is None
    assert not first.renew()
    assert first.refusal is not None
    first.release()
    assert client.get(keys.key_name(name, keys.HOLDER)).endswith(b"/runs/c")
    third.release()
    assert client.get(keys.key_name(name, keys.HOLDER)) is None
    for lease in (second, again):
        lease.release()


@pytest.mark.processes
@pytest.mark.parametrize(
    "then",
    ["its lease ends", "a signal stops the wait", pytest.param("it keeps its lease", marks=pytest.mark.long)],
)
def test_up_waits_for_the_lease_of_another_fleet_of_its_name(
    tmp_path: Path, url: str, client: Any, fleet_id: str, then: str
) -> None:
    holder = keys.key_name(fleet_id, keys.HOLDER)
    client.set(holder, "node-7 /runs/a")
    asked = ("--redis-url", url, "--set", f"fleet.fleet_id={fleet_id}", "--workers", "0", "--timeout-s", "1")
    with RunningFleet(tmp_path, *asked) as fleet:
        waits = r"\(host and run directory: node-7 /runs/a\).*; waiting for the end of its lease"
        fleet.wait_until(lambda: re.search(waits, fleet.said()), "the sentence")
        if then == "its lease ends":
            client.delete(holder)
        elif then == "a signal stops the wait":
            fleet.terminate()
        result = fleet.finish()
    said = result["stderr"]
    code = {"its lease ends": ExitCode.TIMEOUT, "it keeps its lease": ExitCode.CONFIG}.get(then, ExitCode.OK)
    assert result["returncode"] == code, said
    assert ("error: fleet.fleet_id: " in said) is (then == "it keeps its lease")
    assert ("broker started: pid" in said) is (then == "its lease ends")
    assert client.get(holder) == (None if then == "its lease ends" else b"node-7 /runs/a")


def test_a_fleet_whose_redis_is_away_takes_its_lease_later(make_server: Callable[..., Any]) -> None:
    server = make_server().start()
    lease = FleetLease(server.url, "fleet-x", "node-7 /runs/a")
    server.kill()
    assert lease.take()
    assert lease.refusal is None
    lease.release()
