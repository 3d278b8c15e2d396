"""`headrace exporter` and the text that it serves: names and types of the contract, Redis that hangs, the token."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from headrace.broker.reports.report import MergeScript, Part, Report
from headrace.deploy.annexes.watch.commands import MonitoringFile
from headrace.deploy.annexes.watch.exporter import metrics_text as module
from headrace.deploy.annexes.watch.exporter.exporter import chosen_readers
from headrace.deploy.annexes.watch.exporter.metrics_text import exposed_name, metrics_text
from headrace.deploy.annexes.watch.web.web_port import WebPort
from headrace.deploy.monitoring.facts import Facts
from headrace.deploy.run.fleet_file import FleetFile
from headrace.deploy.run.redis_view import LearnerRowView, Snapshot
from headrace.schemas.accounts.figures import GAUGE_TABLE, Metric
from headrace.schemas.accounts.ledger import Drop, LedgerRow
from headrace.schemas.accounts.lifetime_counters import COUNTER_TABLE
from headrace.schemas.accounts.logged_metrics import LoggedMetric
from headrace.schemas.accounts.process_state import ProcessState
from headrace.schemas.accounts.redis_keys import labelled
from headrace.schemas.errors import ConfigError, PortInUseError
from headrace.schemas.settings.config import FleetConfig
from support.waiting import TIMEOUT_S, wait_until

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
PARTS = ("mean", "min", "max")
LAG = "some_lag_agent_steps_bucket"


class Exporter:
    """A `headrace exporter` in a process of its own."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process, self.port = process, port

    def get(self, path: str = "/metrics", method: str = "GET", **headers: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
        try:
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def is_up(self) -> bool:
        try:
            self.get("/")
        except OSError:
            assert self.process.poll() is None, "the exporter ended"
            return False
        return True

    def value(self, name: str) -> float | None:
        found = [sample for family in read_text(self.get()[1]) for sample in family.samples if sample.name == name]
        return found[0].value if found else None


@contextmanager
def exporting(port: int, *arguments: str) -> Iterator[Exporter]:
    command = [sys.executable, "-m", "headrace.deploy", "exporter", "--listen", f"127.0.0.1:{port}", *arguments]
    process = subprocess.Popen(command)
    try:
        exporter = Exporter(process, port)
        wait_until(exporter.is_up, "the exporter")
        yield exporter
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


def families(snapshot: Snapshot, **facts: Any) -> dict[str, Any]:
    text, content_type = metrics_text({'a "b"\\c': Facts(unix_s=0.0, snapshot=snapshot, **facts)}, OPENMETRICS)
    assert content_type.startswith("application/openmetrics-text")
    return {family.name: family for family in read_openmetrics(text.decode())}


def test_each_kind_of_value_gets_its_type_its_unit_and_its_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    own = (Metric(LAG, "agent steps", "by lag", "le"), Metric("one_return_quantile", "return", "of one", "quantile"))
    monkeypatch.setattr(module, "GAUGE_TABLE", (*GAUGE_TABLE, *own))
    gauges = {metric.name: 7.0 for metric in GAUGE_TABLE if not metric.label} | {"of_no_table": 1.0}
    gauges |= {
        labelled(LAG, "le", bound): count for bound, count in (("+Inf", 9.0), ("0", 2.0), ("16", 5.0), ("x", 1.0))
    }
    gauges |= {labelled("one_return_quantile", "quantile", "0.5"): -3.0}
    totals = {metric.name: 5 for metric in COUNTER_TABLE if not metric.label}
    totals[labelled("dropped_chunks_total", "reason", Drop.STALE)] = 8
    gauges |= {labelled("sessions_revoked", "key", "worker.gpu"): 3.0}
    found = families(Snapshot(gauges=gauges, totals=totals))

    lag = found["headrace_some_lag_agent_steps"]
    assert (lag.type, [(sample.labels["le"], sample.value) for sample in lag.samples]) == (
        "histogram",
        [("0.0", 2.0), ("16.0", 5.0), ("+Inf", 9.0)],
    )
    quantile = found["headrace_one_return_quantile"]
    assert (quantile.type, quantile.samples[0].labels["q"], quantile.samples[0].value) == ("gauge", "0.5", -3)
    dropped = {sample.labels["reason"]: sample.value for sample in found["headrace_dropped_chunks"].samples}
    assert dropped == {reason.value: 8 if reason is Drop.STALE else 0 for reason in Drop}
    age = found["headrace_oldest_unsettled_age_seconds"]
    assert (age.type, age.unit, age.samples[0].value) == ("gauge", "seconds", 7.0)
    for name, value in (("messages_refused", 7.0), ("redis_failures", 7.0), ("sessions_revoked", 3.0)):
        counted = found[f"headrace_{name}"]
        assert (counted.type, [sample.value for sample in counted.samples]) == ("counter", [value])
    for metric in (metric for metric in GAUGE_TABLE if not metric.label):
        assert exposed_name(metric.name) in found
    assert not {name for name in found if name.endswith(("_s", "_total")) or "of_no_table" in name}


def every_metric() -> dict[str, Any]:
    """Return all families of a fleet that has a value for each."""
    gauges = {labelled(one.name, one.label, "+Inf") if one.label else one.name: 7.0 for one in GAUGE_TABLE}
    totals = {labelled(one.name, one.label, "a") if one.label else one.name: 5 for one in COUNTER_TABLE}
    usage = {"cpu_share": 0.5, "rss_bytes": 100, "envs_cpu_share": 2.0, "envs_rss_bytes": 1000}
    worker = {"weights_behind": 2, "num_envs": 8, "envs_lost": 1, **usage, "env_hosts": {"connected": 1, "wanted": 2}}
    snapshot = Snapshot(
        gauges=gauges,
        totals=totals,
        supervisor_totals={labelled("restarts_total", "role", "worker"): 4},
        workers={0: worker, 7: {**worker, "env_hosts": {}}, 9: {"num_envs": 1}},
        lease={"connected": 1, "since_unix_s": 5.0, "committed_unix_s": 6.0},
        policies={"hunter": {"agents": 9.0, **{f"{one}_{end}": 3.0 for one in ("return", "len") for end in PARTS}}},
        task_figures={'{"level":3}': {"episodes": 9.0, "env_failures": 2.0, "return_mean": 0.5, "len_mean": 12.0}},
        metrics={"goals": LoggedMetric(reduce="sum", value=17.0)},
    )
    return families(
        snapshot,
        processes={"worker-0": ProcessState(name="worker-0", role="worker", rss_bytes=4096)},
        config=FleetConfig(),
        disk_free_bytes=1 << 30,
        learner_row=LearnerRowView(1, 1, 1.0, 1, 1, {"loss": 0.25}),
    )


def test_every_metric_has_a_unit_in_its_help_and_no_counter_has_a_label_for_a_worker() -> None:
    found = every_metric()
    help_texts = {name: family.documentation for name, family in found.items()}
    begins = re.compile(r"1 (if|while|once) |[A-Z][a-z0-9 /]+: ")
    assert {name: said for name, said in help_texts.items() if not begins.match(said)} == {}
    assert {family.type for family in found.values()} == {"gauge", "counter", "histogram"}
    of_counters = {
        label for family in found.values() if family.type == "counter" for one in family.samples for label in one.labels
    }
    assert of_counters == {"fleet", "reason", "module", "role", "key", "task", "group"}
    samples = [sample for family in found.values() for sample in family.samples]
    assert {sample.labels.get("fleet") for sample in samples} == {'a "b"\\c'}


def test_the_rows_of_workers_are_added_up_and_what_the_learner_logged_has_its_name() -> None:
    found = every_metric()
    sums = {
        **{"envs": 17, "envs_lost": 2, "workers_cpu_share": 1, "workers_rss_bytes": 200, "envs_cpu_share": 4},
        **{"envs_rss_bytes": 2000, "env_hosts_connected": 1, "env_hosts_wanted": 2, "disk_free_bytes": 1 << 30},
    }
    assert {name: found[f"headrace_{name}"].samples[0].value for name in sums} == sums
    of_task = [found[f"headrace_task_{name}"].samples[0] for name in ("return", "len", "episodes", "env_failures")]
    assert [(one.labels["task"], one.value) for one in of_task] == [('{"level":3}', n) for n in (0.5, 12.0, 9.0, 2.0)]
    (loss,) = found["headrace_learner_figure"].samples
    assert (loss.labels["name"], loss.value) == ("loss", 0.25)
    silent = families(Snapshot(), learner_row=LearnerRowView(1, 1, 1.0, 1, 1, {"loss": 0.25}))
    assert silent.keys().isdisjoint({"headrace_learner_figure", "headrace_envs", "headrace_disk_free_bytes"})


def test_each_metric_has_a_panel_unless_a_panel_shows_it_otherwise() -> None:
    dashboard = json.loads(MonitoringFile.GRAFANA_DASHBOARD.text())
    queries = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ()))
    shown = {re.sub("_(total|bucket)$", "", name) for name in re.findall(r"headrace_\w+", queries)}
    found = set(every_metric())
    assert shown - found == set(), "a panel asks for what the exporter does not have"
    counted_otherwise = {
        *("batches", "settled_batches", "chunks", "accepted_chunks", "committed_chunks", "dropped_chunks"),
        *(
            "env_steps",
            "learner_epoch",
            "episodes_window",
            "episodes_window_aborted",
            "aborted_window",
            "policy_agents",
        ),
    }
    moments = {"reported", "lost_lives_close", "learner_lease", "learner_committed"}
    others = {*counted_otherwise, *(f"{name}_timestamp_seconds" for name in moments), "ended"}
    assert {name.removeprefix("headrace_") for name in found - shown} == others


def test_counters_without_a_value_are_zero_unless_redis_has_lost_them_all() -> None:
    def env_steps(totals: dict[str, int]) -> list[float]:
        samples = families(Snapshot(totals=totals)).get("headrace_env_failures")
        return [sample.value for sample in samples.samples] if samples else []

    assert env_steps({"env_steps_total": 5}) == [0.0]
    assert env_steps({}) == []


@pytest.mark.parametrize("accept", ["", "text/plain;version=x", "application/openmetrics-text; version=1.0.0.x", "a"])
def test_any_accept_header_gets_a_text(accept: str) -> None:
    text, content_type = metrics_text({"one": None}, accept)
    assert b'headrace_up{fleet="one"} 0.0' in text
    assert "text" in content_type


@pytest.mark.processes
def test_a_scrape_never_hangs_and_reports_an_outage_of_redis(
    make_server: Callable[..., Any], make_row: Callable[..., LedgerRow], free_port: int
) -> None:
    server, fleets = make_server().start(), ("one", "two")
    with server.client() as client:
        for fleet_id in fleets:
            report = Report(rows=[make_row()], gauges={"unix_s": 1.0, "held_batches": 3.0})
            MergeScript(client, fleet_id, live_s=900.0)(Part(report), [], 0)
    chosen = [word for fleet_id in fleets for word in ("--fleet-id", fleet_id)]
    with exporting(free_port, "--redis-url", server.url, *chosen) as exporter:
        status, text = exporter.get()
        assert (status, text.count("headrace_held_batches{")) == (200, 2)
        assert exporter.get(Accept=OPENMETRICS)[1].endswith("# EOF\n")
        assert exporter.get(Host="elsewhere.example")[0] == 421
        assert exporter.get(method="POST")[0] == 405
        assert exporter.value("headrace_up") == 1

        server.signal(signal.SIGSTOP)
        began = time.monotonic()
        assert exporter.value("headrace_up") == 0
        assert exporter.value("headrace_held_batches") is None
        assert time.monotonic() - began < 2 * 9.0, "two scrapes, of which Prometheus gives each 10 s"
        server.signal(signal.SIGCONT)
        wait_until(lambda: exporter.value("headrace_up") == 1, "Redis again")
        server.kill()
        assert exporter.value("headrace_up") == 0
        server.start()
        wait_until(lambda: exporter.value("headrace_up") == 1, "the next Redis")


@pytest.mark.processes
def test_the_exporter_requires_a_configured_token_and_needs_one_off_loopback(
    shared_server: Any, tmp_path: Path, free_port: int
) -> None:
    token = tmp_path / "token"
    token.write_text("a-word-that-nobody-guesses\n")
    token.chmod(0o600)
    of_fleet = ("--redis-url", shared_server.url, "--fleet-id", "none")
    with exporting(free_port, *of_fleet, "--token-file", str(token)) as exporter:
        assert exporter.get()[0] == 401
        assert exporter.get(Authorization="Bearer another-word-of-16")[0] == 401
        status, text = exporter.get(Authorization="Bearer a-word-that-nobody-guesses", Host="elsewhere.example")
        assert (status, 'headrace_broker_up{fleet="none"} 0.0' in text) == (200, True)
        with pytest.raises(PortInUseError):
            WebPort(f"127.0.0.1:{free_port}", None)
    with pytest.raises(ConfigError, match=r"reachable from other machines.*--token-file"):
        WebPort("0.0.0.0:0", None)
    for listen in ("9747", "127.0.0.1:", ":9747", "127.0.0.1:65536", "127.0.0.1:x"):
        with pytest.raises(ConfigError, match="is not HOST:PORT"):
            WebPort(listen, None)


def test_incomplete_conflicting_or_repeated_fleet_arguments_are_refused(tmp_path: Path) -> None:
    for one in (tmp_path / "one", tmp_path / "two"):
        one.mkdir()
        FleetFile(fleet_id="same").write(one / "fleet.json")
    url = "redis://127.0.0.1:1"
    for wrong, words in (
        ({"redis_url": url}, "--redis-url and --fleet-id together"),
        ({"fleet_ids": ["a"]}, "--redis-url and --fleet-id together"),
        ({"redis_url": url, "fleet_ids": ["a"], "run_dirs": [tmp_path / "one"]}, "name fleets by --run-dir, or"),
        ({"redis_url": url, "fleet_ids": ["a", "a"]}, "fleet a is named twice"),
        ({"run_dirs": [tmp_path / "one", tmp_path / "two"]}, "fleet same is named twice"),
    ):
        with pytest.raises(ConfigError, match=words):
            chosen_readers(**wrong)  # type: ignore[arg-type]
