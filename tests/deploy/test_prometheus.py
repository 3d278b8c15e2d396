"""The files for Prometheus, Alertmanager and Grafana, tried with the programs: Grafana alone is not rendered."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import typer
from command_reference import commands

from headrace.deploy.annexes.watch.commands import DEFAULT_LISTEN, MonitoringFile
from headrace.deploy.command.cli import app
from headrace.schemas.settings.config import FleetConfig
from support.fleets.running_fleet import RunningFleet
from support.ports import free_port
from support.waiting import TIMEOUT_S, wait_until

PROGRAMS = ("prometheus", "promtool", "prometheus-alertmanager")
MISSING = [program for program in PROGRAMS if shutil.which(program) is None]
pytestmark = [
    pytest.mark.prometheus,
    pytest.mark.skipif(bool(MISSING), reason=f"not on PATH: {', '.join(MISSING)}"),
]

RULES = MonitoringFile.ALERT_RULES
ALERTS = re.findall(r"- alert: (\w+)", RULES.text())
SELECTOR = re.compile(r"\bheadrace_\w+(?:\{[^{}]*\})?")

ONLY_IN_TROUBLE = r"headrace_findings\{.* > 0|changes\(|headrace_workers_blocked|headrace_aborted_(return|len)"
ONLY_WITH_PEERS = r"headrace_(env_hosts|envs_(cpu|rss)|client)"
ONLY_AT_TIMES = r".*headrace_(sessions_revoked|worker_env_steps_per_second_quantile|task_|group_)"
NOT_ALWAYS = re.compile(f"{ONLY_IN_TROUBLE}|{ONLY_WITH_PEERS}|{ONLY_AT_TIMES}")
"""Queries that a fleet without trouble, env hosts, clients, revoked keys, many workers, tasks or groups leave empty."""

TWO_POLICIES = (
    *("--env", "headrace.workers.agents.examples:two_carts", "--workers", "2", "--num-envs", "2"),
    *("--set", 'sampling.policies={"short": {}, "long": {}}', "--set", "learner.steps_per_update=256"),
    *("--set", "learner.epochs=1", "--set", 'sampling.callbacks=["mine:Logs"]'),
)
MINE = """
class Logs:
    def on_episode_end(self, episode, metrics_logger):
        metrics_logger.log_value("goals", len(episode))
"""


def test_the_rules_and_the_scrape_config_are_clean(tmp_path: Path) -> None:
    (tmp_path / "prometheus.yml").write_text(MonitoringFile.SCRAPE_CONFIG.text())
    (tmp_path / "headrace-rules.yml").write_text(RULES.text())
    for kind, file in (("config", "prometheus.yml"), ("rules", "headrace-rules.yml")):
        checked = promtool("check", kind, str(tmp_path / file))
        assert (checked.returncode, "SUCCESS" in checked.stdout) == (0, True), checked
    assert DEFAULT_LISTEN in MonitoringFile.SCRAPE_CONFIG.text()
    command = [sys.executable, "-m", "headrace.deploy", "exporter", "--print", "alert-rules"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == RULES.text()


def test_runbooks_name_only_existing_commands_and_settings() -> None:
    runbooks = " ".join(re.findall(r'runbook: "(.*)"', RULES.text()))
    named = set(re.findall(r"`headrace ([a-z-]+)", runbooks))
    assert named
    assert named <= {name.split()[1] for name, _ in commands(typer.main.get_command(app))}
    settings = set(re.findall(r"\b(sampling|worker|broker|supervisor)\.([a-z_]+)", runbooks)) - {("broker", "log")}
    assert len(settings) > 4
    assert all(hasattr(getattr(FleetConfig(), section), key) for section, key in settings), settings


FIRING: dict[str, dict[str, str]] = {
    "HeadraceExporterGone": {'up{job="headrace"}': "1 1 0x20"},
    "HeadraceRedisAway": {"headrace_up": "1 1 0x20"},
    "HeadraceFleetGone": {"headrace_broker_up": "1 1 0x20", "headrace_ended": "0x20"},
    "HeadraceLearnerGone": {"headrace_learner_connected": "1 1 0x20", "headrace_broker_up": "1x30"},
    "HeadraceLearnerNotCommitting": {
        "headrace_learner_committed_timestamp_seconds": "0 30 30x40",
        "headrace_held_batches": "4x40",
        "headrace_learner_connected": "1x40",
    },
    "HeadraceQueueOld": {"headrace_oldest_unsettled_age_seconds": "1 301x40"},
    "HeadraceWorkersMissing": {"headrace_workers": "4 4 3x40"},
    "HeadraceWorkersLate": {"headrace_weights_lag": "21x40"},
    "HeadraceLagHigh": {
        'headrace_consumed_lag_agent_steps_bucket{le="16"}': "0+80x40",
        'headrace_consumed_lag_agent_steps_bucket{le="32"}': "0+100x40",
        'headrace_consumed_lag_agent_steps_bucket{le="+Inf"}': "0+100x40",
    },
    "HeadraceEnvFailures": {"headrace_env_failures_total": "0 0+1x40"},
    "HeadraceStepsDropped": {
        'headrace_dropped_agent_steps_total{reason="stale"}': "0+2x40",
        "headrace_agent_steps_total": "0+100x40",
    },
    "HeadraceEnvHostsMissing": {"headrace_env_hosts_wanted": "2x40", "headrace_env_hosts_connected": "2 1x40"},
    "HeadraceEpisodesAborted": {
        "headrace_aborted_episodes_total": "0 0+2x40",
        "headrace_episodes_total": "0+10x40",
    },
    "HeadraceRedisFailures": {"headrace_redis_failures_total": "0 0+1x40"},
    "HeadraceMessagesRefused": {"headrace_messages_refused_total": "0 0+2x40"},
    "HeadraceLivesFenced": {"headrace_fenced_lives_total": "0x8 4x30"},
    "HeadraceClientsSlow": {'headrace_client_latency_seconds{q="0.95"}': "0.5 1.5x40"},
    "HeadraceDiskSmall": {"headrace_disk_free_bytes": "2e9 9e8x40"},
    "HeadraceBrokerRestarts": {'headrace_restarts_total{role="broker"}': "0x8 1x30"},
    "HeadraceProcessRestarts": {'headrace_restarts_total{role="worker"}': "0x8 4x30"},
    "HeadraceFinding": {'headrace_findings{kind="no_learner",severity="error"}': "1x40"},
}
"""Series, a value each 30 s, with which each alert fires within 15 minutes."""

SILENT: dict[str, dict[str, str]] = {
    "HeadraceExporterGone": {'up{job="headrace"}': "1 0 1x20", 'up{job="other"}': "0x30"},
    "HeadraceRedisAway": {"headrace_up": "1 0x30", "headrace_broker_up": "1 0x30"},
    "HeadraceFleetGone": {"headrace_broker_up": "1 0x30", "headrace_ended": "0 1x30"},
    "HeadraceLearnerGone": {"headrace_learner_connected": "0x30", "headrace_broker_up": "0x30"},
    "HeadraceLearnerNotCommitting": {
        "headrace_learner_committed_timestamp_seconds": "0+30x40",
        "headrace_held_batches": "4x40",
        "headrace_learner_connected": "1x40",
    },
    "HeadraceQueueOld": {"headrace_oldest_unsettled_age_seconds": "1 300x40"},
    "HeadraceWorkersMissing": {"headrace_workers": "4 4 3 3 4x40"},
    "HeadraceWorkersLate": {"headrace_weights_lag": "20 40 20x40"},
    "HeadraceLagHigh": {
        'headrace_consumed_lag_agent_steps_bucket{le="16"}': "0+91x40",
        'headrace_consumed_lag_agent_steps_bucket{le="32"}': "0+100x40",
        'headrace_consumed_lag_agent_steps_bucket{le="+Inf"}': "0+100x40",
    },
    "HeadraceEnvFailures": {"headrace_env_failures_total": "0x5 3x40"},
    "HeadraceStepsDropped": {
        'headrace_dropped_agent_steps_total{reason="stale"}': "0+2x40",
        "headrace_agent_steps_total": "0+300x40",
    },
    "HeadraceEnvHostsMissing": {"headrace_env_hosts_wanted": "2x40", "headrace_env_hosts_connected": "2 1 1 2x40"},
    "HeadraceEpisodesAborted": {
        "headrace_aborted_episodes_total": "0 0+2x40",
        "headrace_episodes_total": "0+30x40",
    },
    "HeadraceRedisFailures": {"headrace_redis_failures_total": "0x5 2x40"},
    "HeadraceMessagesRefused": {"headrace_messages_refused_total": "0x5 9x40"},
    "HeadraceLivesFenced": {"headrace_fenced_lives_total": "0x8 2x30"},
    "HeadraceClientsSlow": {
        'headrace_client_latency_seconds{q="0.95"}': "1.5x5 0.9x40",
        'headrace_client_latency_seconds{q="0.99"}': "5x40",
    },
    "HeadraceDiskSmall": {"headrace_disk_free_bytes": "9e8x5 2e9x40"},
    "HeadraceBrokerRestarts": {'headrace_restarts_total{role="learner"}': "0x8 1x30"},
    "HeadraceProcessRestarts": {'headrace_restarts_total{role="worker"}': "0x8 2x30"},
    "HeadraceFinding": {'headrace_findings{kind="worker_late",severity="warning"}': "1x40"},
}


def test_each_alert_fires_in_its_trouble_and_is_silent_without_it(tmp_path: Path) -> None:
    assert sorted(ALERTS) == sorted(FIRING) == sorted(SILENT)
    fired = [_rule_test(name, FIRING[name], {"labels": "{}", "value": 1}) for name in ALERTS]
    silent = [_rule_test(name, SILENT[name]) for name in ALERTS]
    file, rules = tmp_path / "tests.yml", tmp_path / "rules.yml"
    rules.write_text(RULES.text())
    file.write_text(json.dumps({"rule_files": [str(rules)], "evaluation_interval": "30s", "tests": fired + silent}))
    tested = promtool("test", "rules", str(file))
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_queries_that_a_healthy_fleet_leaves_empty_have_values_in_trouble(tmp_path: Path) -> None:
    series = {
        'headrace_findings{fleet="f",kind="no_learner",severity="error"}': "1x40",
        'headrace_restarts_total{fleet="f",role="broker"}': "0x19 1x20",
        'headrace_learner_epoch{fleet="f"}': "1x19 2x20",
        'headrace_workers_blocked{fleet="f",reason="window"}': "2x40",
        'headrace_aborted_return_mean{fleet="f"}': "3.5x40",
        'headrace_aborted_len_mean{fleet="f"}': "35x40",
        'headrace_env_hosts_connected{fleet="f"}': "1x40",
        'headrace_env_hosts_wanted{fleet="f"}': "1x40",
        'headrace_envs_cpu_share{fleet="f"}': "1.5x40",
        'headrace_envs_rss_bytes{fleet="f"}': "1e9x40",
        'headrace_clients{fleet="f"}': "8x40",
        'headrace_client_requests_per_second{fleet="f"}': "800x40",
        'headrace_client_latency_seconds{fleet="f",q="0.5"}': "0.01x40",
        'headrace_sessions_revoked_total{fleet="f",key="worker.gpu"}': "1x40",
        'headrace_worker_env_steps_per_second_quantile{fleet="f",q="0.5"}': "100x40",
        'headrace_task_return{fleet="f",task="a"}': "0.5x40",
        'headrace_task_len{fleet="f",task="a"}': "12x40",
        'headrace_task_episodes_total{fleet="f",task="a"}': "0+3x40",
        'headrace_task_env_failures_total{fleet="f",task="a"}': "0+1x40",
        'headrace_group_readers{fleet="f",group="a"}': "1x40",
        'headrace_group_lag_agent_steps{fleet="f",group="a"}': "7x40",
        'headrace_group_oldest_age_seconds{fleet="f",group="a"}': "2x40",
        'headrace_group_committed_agent_steps_total{fleet="f",group="a"}': "0+3x40",
        'headrace_group_lost_agent_steps_total{fleet="f",group="a"}': "0+1x40",
    }
    queries = [query.replace("[20s]", "[5m]") for query in dashboard_queries("f") if NOT_ALWAYS.match(query)]
    assert len(queries) == len(series)
    asked = [
        {"expr": f"count({query})", "eval_time": "10m", "exp_samples": [{"labels": "{}", "value": 1}]}
        for query in queries
    ]
    inputs = [{"series": name, "values": values} for name, values in series.items()]
    file = tmp_path / "tests.yml"
    file.write_text(json.dumps({"tests": [{"interval": "30s", "input_series": inputs, "promql_expr_test": asked}]}))
    tested = promtool("test", "rules", str(file))
    assert tested.returncode == 0, tested.stdout + tested.stderr


@pytest.mark.slow
def test_prometheus_answers_every_query_of_a_fleet_and_delivers_an_alert(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    with RunningFleet(tmp_path / "run", *TWO_POLICIES, cwd=tmp_path) as fleet, receiver() as (webhook, received):
        fleet.wait_until(lambda: fleet.steps() > 0, "steps")
        with scraped(tmp_path, webhook, fleet.run_dir) as (answers, exporter_port):
            text = get(f"http://127.0.0.1:{exporter_port}/metrics").decode()
            checked = promtool("check", "metrics", text=text)
            assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
            fleet_id = re.findall(r'headrace_up\{fleet="([^"]+)"\}', text)[0]
            of_dashboard = [q for q in dashboard_queries(fleet_id) if not NOT_ALWAYS.match(q)]
            of_rules = {one for one in SELECTOR.findall(RULES.text()) if not NOT_ALWAYS.match(one)}
            assert len(of_dashboard) > 60
            assert len(of_rules) > 14
            for query in (*of_dashboard, *sorted(of_rules)):
                fleet.wait_until(lambda it=query: answers.has_data(it), f"data for {query}")  # type: ignore[misc]
            assert answers.values("fleet", "headrace_up") == [fleet_id]

            fleet.send(signal.SIGKILL, "broker")
            fleet.wait_until(lambda: "HeadraceBrokerRestarts" in received, "the alert at its receiver")
            alert = received["HeadraceBrokerRestarts"]
            assert alert["labels"]["fleet"] == fleet_id
            assert fleet_id in alert["annotations"]["summary"]
            assert "broker.log" in alert["annotations"]["runbook"]
            fleet.wait_until(lambda: answers.has_data("changes(headrace_restarts_total[1m]) > 0"), "the mark")
        fleet.terminate()
        assert fleet.finish()["balanced"]


@pytest.mark.slow
@pytest.mark.thorough
def test_prometheus_answers_every_query_of_fleets_with_trouble_env_hosts_and_clients(tmp_path: Path) -> None:
    common = ("--workers", "1", "--num-envs", "2", "--set", "learner.steps_per_update=256")
    remote = ("--env", "support.envs.fleet:failing_or_gone", "--no-check-env", "--set", "sampling.env_placement=remote")
    served = ("--env", "CartPole-v1", "--serve", "--set", "serving.http_port=0")
    with (
        RunningFleet(tmp_path / "remote", *common, *remote, "--env-hosts", "2") as hosts,
        RunningFleet(tmp_path / "served", *common, *served) as serving,
        receiver() as (webhook, _),
    ):
        hosts.wait_until(lambda: hosts.steps() > 0, "steps of envs in hosts")
        serving.wait_until((tmp_path / "served" / "rendezvous.json").exists, "an address for clients")
        client = (
            sys.executable,
            "-m",
            "headrace.deploy.clients.cartpole",
            str(tmp_path / "served/rendezvous.json"),
            "2",
        )
        with (
            running(*client),
            scraped(tmp_path, webhook, hosts.run_dir, serving.run_dir) as (answers, _),
        ):
            wait_until(lambda: len(answers.values("fleet", "headrace_up")) == 2, "both fleets")
            fleet_ids = "|".join(answers.values("fleet", "headrace_up"))
            wanted = [q for q in dashboard_queries(fleet_ids) if re.match(f"{ONLY_IN_TROUBLE}|{ONLY_WITH_PEERS}", q)]
            wanted += [one for one in SELECTOR.findall(RULES.text()) if re.match(ONLY_WITH_PEERS, one)]
            assert len(wanted) == 16
            for role in ("worker", "learner"):
                hosts.send(signal.SIGKILL, role)
            for query in sorted(wanted, key=lambda query: "changes(" not in query):
                if "workers_blocked" in query:
                    serving.send(signal.SIGSTOP, "learner")
                hosts.wait_until(lambda it=query: answers.has_data(it), f"data for {query}")  # type: ignore[misc]


@contextmanager
def scraped(folder: Path, webhook: str, *run_dirs: Path) -> Iterator[tuple[Prometheus, int]]:
    """Run an exporter of these fleets, Prometheus and Alertmanager. Yield Prometheus, and the exporter's port."""
    exporter_port, prometheus_port, alerts_port = free_port(), free_port(), free_port()
    files = write_files(folder, exporter_port, alerts_port, webhook)
    chosen = [word for run_dir in run_dirs for word in ("--run-dir", str(run_dir))]
    exporter = (sys.executable, "-m", "headrace.deploy", "exporter", "--listen", f"127.0.0.1:{exporter_port}", *chosen)
    with (
        running(*exporter),
        running(*alertmanager(files, alerts_port)),
        running(*prometheus(files, prometheus_port)),
    ):
        answers = Prometheus(prometheus_port)
        wait_until(lambda: answers.has_data("headrace_up == 1"), "the first scrape")
        yield answers, exporter_port


def promtool(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["promtool", *arguments], input=text, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )


def _rule_test(name: str, series: dict[str, str], *expected: dict[str, Any]) -> dict[str, Any]:
    """Ask at each half minute of 15 minutes whether the alert has fired; no answer is expected without `expected`."""
    fires = f'ALERTS{{alertname="{name}",alertstate="firing"}}'
    asked = {"expr": f"count(count_over_time({fires}[15m]))", "eval_time": "15m", "exp_samples": list(expected)}
    inputs = [{"series": name, "values": values} for name, values in series.items()]
    return {"name": name, "interval": "30s", "input_series": inputs, "promql_expr_test": [asked]}


def dashboard_queries(fleet_id: str) -> list[str]:
    """Return each query of the dashboard, its variables replaced as Grafana does."""
    dashboard = json.loads(MonitoringFile.GRAFANA_DASHBOARD.text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    queries += [annotation["expr"] for annotation in dashboard["annotations"]["list"]]
    replaced = [query.replace("$fleet", fleet_id).replace("$__rate_interval", "20s") for query in queries]
    assert not [query for query in replaced if "$" in query]
    return replaced


def write_files(folder: Path, exporter_port: int, alerts_port: int, webhook: str) -> Path:
    """Write the files as they come, but for ports, intervals and the receiver."""
    config = MonitoringFile.SCRAPE_CONFIG.text()
    for before, after in (
        (DEFAULT_LISTEN, f"127.0.0.1:{exporter_port}"),
        ("127.0.0.1:9093", f"127.0.0.1:{alerts_port}"),
        ("scrape_interval: 5s", "scrape_interval: 500ms"),
        ("evaluation_interval: 15s", "evaluation_interval: 500ms"),
    ):
        assert before in config
        config = config.replace(before, after)
    (folder / "prometheus.yml").write_text(config)
    (folder / "headrace-rules.yml").write_text(RULES.text())
    route = {"receiver": "here", "group_wait": "0s", "group_by": ["alertname"]}
    receivers = [{"name": "here", "webhook_configs": [{"url": webhook}]}]
    (folder / "alertmanager.yml").write_text(json.dumps({"route": route, "receivers": receivers}))
    return folder


def prometheus(files: Path, port: int) -> tuple[str, ...]:
    return (
        "prometheus",
        f"--config.file={files / 'prometheus.yml'}",
        f"--storage.tsdb.path={files / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    )


def alertmanager(files: Path, port: int) -> tuple[str, ...]:
    return (
        "prometheus-alertmanager",
        f"--config.file={files / 'alertmanager.yml'}",
        f"--storage.path={files / 'alerts'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--cluster.listen-address=",
        "--log.level=warn",
    )


@contextmanager
def running(*command: str) -> Iterator[None]:
    process = subprocess.Popen(command)
    try:
        yield
        assert process.poll() is None, f"{command[0]} ended"
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def receiver() -> Iterator[tuple[str, dict[str, dict[str, Any]]]]:
    """A web hook on loopback; yields its URL and the firing alerts that came, by name."""
    received: dict[str, dict[str, Any]] = {}

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            received.update({alert["labels"]["alertname"]: alert for alert in body["alerts"]})
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = HTTPServer(("127.0.0.1", free_port()), Hook)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/", received
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
        return bytes(answer.read())


class Prometheus:
    """The HTTP interface of a Prometheus."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1"

    def has_data(self, query: str) -> bool:
        """Return whether an instant query has an answer that is a number. False before it can be asked."""
        try:
            found = json.loads(get(f"{self._url}/query?{urllib.parse.urlencode({'query': query})}"))
        except urllib.error.HTTPError as error:
            error.close()
            if error.code != 503:  # it reads its log first
                raise
            return False
        except OSError:
            return False
        return any(series["value"][1] != "NaN" for series in found["data"]["result"])

    def values(self, label: str, name: str) -> list[str]:
        """Return the values of a label, as `label_values(name, label)` in Grafana does."""
        url = f"{self._url}/label/{label}/values?{urllib.parse.urlencode({'match[]': name})}"
        values: list[str] = json.loads(get(url))["data"]
        return values
