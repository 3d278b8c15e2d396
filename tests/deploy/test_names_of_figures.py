"""A figure has one value and a known name everywhere: in the rows of loggers and reports, in Redis, for Prometheus."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from string import Formatter
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families as read_text

from headrace.deploy.annexes.watch.exporter.metrics_text import exposed_name, metrics_text
from headrace.deploy.annexes.watch.state.fleet_state import fleet_state
from headrace.deploy.annexes.watch.state.shown_figures import TILES
from headrace.deploy.loggers import Row, RunInfo
from headrace.deploy.loggers.logger_thread import open_loggers
from headrace.deploy.monitoring.facts import Facts
from headrace.deploy.report.run_rows import fleet_row, learner_row
from headrace.deploy.run.redis_view import LearnerRowView, Snapshot
from headrace.schemas.accounts.figures import FLEET_TABLE, GAUGE_TABLE, Metric
from headrace.schemas.accounts.ledger import FleetLedger
from headrace.schemas.accounts.lifetime_counters import COUNTER_TABLE
from headrace.schemas.accounts.logged_metrics import LoggedMetric
from headrace.schemas.accounts.redis_keys import labelled
from headrace.schemas.settings.config import LoggingSection

PAGE = Path(__file__).parents[2] / "docs/guides/prometheus.md"
WORD = re.compile(r"(REASON|ROLE|PART|ID|STATISTIC|NAME|KEY)")
"""Words of the page that stand for any text."""
NO_FIGURES = {"kind", "time", "elapsed_s", "learner_row"}
MEMBERS = ("weights_behind", "num_envs", "envs_lost", "cpu_share", "rss_bytes", "envs_cpu_share", "envs_rss_bytes")


def fields(metric: Metric) -> list[str]:
    values = metric.known_values() or ("0", "+Inf")
    return [labelled(metric.name, metric.label, value) for value in values] if metric.label else [metric.name]


GAUGES = {field: 1.0 + n for n, field in enumerate(one for metric in GAUGE_TABLE for one in fields(metric))}
GAUGES |= {"learner_epoch": 3.0, "weights_seq": 70.0, "episodes_window": 100.0, "workers": 1.0, "held_batches": 5.0}
TOTALS = {field: 100 + n for n, field in enumerate(one for metric in COUNTER_TABLE for one in fields(metric))}
LEARNED = LearnerRowView(3, 9, 1000.0, TOTALS["env_steps_total"], 70, {"loss": 0.25, "hunter/kl (mean)": 0.5})


def the_fleet() -> Snapshot:
    """Return a fleet with a value for each figure."""
    of_policy = {f"{name}_{part}": 3.0 for name in ("return", "len") for part in ("mean", "min", "max")}
    return Snapshot(
        gauges=GAUGES,
        totals=TOTALS,
        fleet=FleetLedger(queued=17),
        workers={0: {**dict.fromkeys(MEMBERS, 4), "env_hosts": {"connected": 1, "wanted": 2}}},
        supervisor_totals={labelled("restarts_total", "role", role): count for role, count in RESTARTS.items()},
        policies={"hunter": {**of_policy, "agents": 30.0}},
        metrics={"goals (all)": LoggedMetric(reduce="sum", value=17.0)},
    )


RESTARTS = {"worker": 2, "broker": 1}


def rows() -> list[Row]:
    return [fleet_row(the_fleet(), RESTARTS, 1000.0, 10.0), learner_row(LEARNED, 990.0)]


def figures() -> dict[str, float]:
    return {name: float(value) for row in rows() for name, value in row.items() if name not in NO_FIGURES}


def samples() -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return what Prometheus gets, by name and labels."""
    text = metrics_text({"f": Facts(1000.0, the_fleet(), learner_row=LEARNED)})[0].decode()
    return {
        (sample.name, frozenset(sample.labels.items() - {("fleet", "f")})): sample.value
        for family in read_text(text)
        for sample in family.samples
    }


def table() -> Iterator[tuple[re.Pattern[str], str]]:
    """Yield (columns, metric) of the page. Words in capitals stand for any text."""
    section = PAGE.read_text().split("## The same figures")[1].split("## ")[0]
    for left, right in re.findall(r"^\| (`[^|]+`) \| ([^|]+) \|$", section, re.M):
        columns, metrics = re.findall(r"`([^`]+)`", left), re.findall(r"`([^`]+)`", right)
        for number, column in enumerate(columns):
            pattern = WORD.sub(r"(?P<\1>.+)", column).replace("_pN", r"_p(?P<N>\d+)")
            yield re.compile(pattern), metrics[min(number, len(metrics) - 1)]


def metric_of(column: str) -> str:
    """Return the metric of a column as the page has it: an expression, or a name."""
    for pattern, metric in table():
        if found := pattern.fullmatch(column):
            for word, text in (found.groupdict() | {"COLUMN": column}).items():
                metric = metric.replace("0.N", f"{int(text) / 100:g}") if word == "N" else metric.replace(word, text)
            return metric
    return exposed_name(column)


def value_of(metric: str, told: Mapping[tuple[str, frozenset[tuple[str, str]]], float]) -> float | None:
    if summed := re.fullmatch(r"sum\((\w+)\)", metric):
        return sum(value for (name, _), value in told.items() if name == summed[1])
    name, _, labels = metric.partition("{")
    return told.get((name, frozenset(re.findall(r'(\w+)="([^"]*)"', labels))))


def test_each_column_of_the_rows_has_the_value_of_the_metric_that_the_page_names() -> None:
    told, wanted = samples(), figures()
    lags = {name for name in wanted if re.fullmatch(r"(accepted|consumed)_lag_p\d+", name)}
    assert len(lags) == 4
    assert len(wanted) > 80
    assert {name: value_of(metric_of(name), told) for name in wanted if name not in lags} == {
        name: value for name, value in wanted.items() if name not in lags
    }


def test_each_figure_is_in_the_rows_and_each_text_names_figures_that_exist() -> None:
    known, in_rows = (*GAUGE_TABLE, *COUNTER_TABLE, *FLEET_TABLE), figures().keys()
    moments = {metric.name for metric in known if metric.name.endswith("unix_s")}
    columns = {one.name: one.column_for("0.5" if one.label in ("quantile", "le") else "") for one in known}
    assert {name for name, column in columns.items() if not any(c.startswith(column) for c in in_rows)} == moments
    numbers = fleet_state(Facts(1000.0, the_fleet()), [])["numbers"].keys()
    named = {name for figure in TILES for _, name, _, _ in Formatter().parse(figure.shown) if name}
    assert named - numbers == {"lost", "lost_share", "workers_wanted", "left_out"}, (
        "which are of the books and the settings"
    )


def logged(tmp_path: Path, name: str) -> None:
    threads = open_loggers(LoggingSection(loggers=[name]), RunInfo("fleet-1", tmp_path, {}))
    for thread in threads:
        for row in rows():
            thread.offer(row, int(row["env_steps"]))
        thread.begin_close()
    for thread in threads:
        thread.finish_close(60.0)


AXES = {"env_steps"}
"""Figures that TensorBoard has as its own axis."""


def test_tensorboard_groups_all_figures(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed; pip install 'headrace[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logged(tmp_path, "tensorboard")
    from headrace.deploy.annexes.loggers.tensorboard_logger import tag_of

    tags = set(EventAccumulator(str(tmp_path / "tensorboard")).Reload().Tags()["scalars"])
    assert tags == {tag_of(name) for name in figures()} - {tag_of(name) for name in AXES}
    groups = {"sampling", "broker", "processes", "learner", "learner_time", "policies", "callbacks"}
    assert {tag.partition("/")[0] for tag in tags} == groups
    assert {"sampling/episode_return_mean", "broker/held_batches", "learner/loss", "processes/restarts"} < tags


def test_wandb_gets_all_figures_under_the_names_of_the_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed; pip install 'headrace[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    logged(tmp_path, "wandb")
    (written,) = tmp_path.glob("wandb/offline-run-*/run-fleet-1.wandb")
    content = written.read_bytes()
    assert [name for name in figures() if name.encode() not in content] == []


def test_mlflow_gets_all_figures_under_the_names_of_the_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow: Any = pytest.importorskip("mlflow", reason="mlflow is not installed; pip install 'headrace[mlflow]'")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a store that needs no database package
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    logged(tmp_path, "mlflow")
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("headrace").experiment_id])
    allowed = {re.sub(r"[^A-Za-z0-9_\-. /:]", "_", name) for name in figures()} | {"time", "elapsed_s"}
    totals = {
        "restarts",
        *(metric.column_for() for metric in (*GAUGE_TABLE, *COUNTER_TABLE) if metric.label == "reason"),
    }
    assert set(run.data.metrics) == (allowed - totals) | {f"{name}/total" for name in totals}
