"""Loggers of a run: failing, slow and missing loggers, and the output of the built-in ones."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import orjson
import pytest

from headrace.deploy.loggers import Row, RunInfo
from headrace.deploy.loggers.logger_thread import MOST_WAITING, LoggerThread, open_loggers
from headrace.deploy.report import run_log
from headrace.deploy.run.redis_view import Snapshot
from headrace.schemas.errors import ConfigError
from headrace.schemas.settings.config import FleetConfig, LoggingSection
from support.waiting import TIMEOUT_S, wait_until

LEARNER_ROW: Row = {
    "kind": "learner",
    "time": 1000.5,
    "elapsed_s": 2.0,
    "env_steps": 64,
    "learner_row": "1-7",
    "learner/policy (loss)": -0.25,
}


class Recorder:
    """A logger that keeps what it gets, waits at `gate`, and raises at the row `fails_at`."""

    def __init__(self, fails_at: int = -1) -> None:
        self.rows: list[tuple[Row, int]] = []
        self.closed = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self.fails_at = fails_at

    def log(self, row: Row, step: int) -> None:
        assert self.gate.wait(TIMEOUT_S)
        if row["n"] == self.fails_at:
            raise RuntimeError("the service has gone")
        self.rows.append((row, step))

    def close(self) -> None:
        self.closed.set()


def end(*threads: LoggerThread, deadline_s: float = TIMEOUT_S) -> None:
    for thread in threads:
        thread.begin_close()
    for thread in threads:
        thread.finish_close(deadline_s)


def test_a_failing_logger_is_named_once_and_the_other_logger_continues(caplog: pytest.LogCaptureFixture) -> None:
    broken, good = Recorder(fails_at=1), Recorder()
    threads = [LoggerThread("mine:Broken", broken), LoggerThread("mine:Good", good)]
    for n in range(5):
        for thread in threads:
            thread.offer({"n": n}, 10 * n)
    wait_until(lambda: "mine:Broken" in caplog.text)
    for n in range(MOST_WAITING + 1):  # of which none waits any more
        threads[0].offer({"n": n}, n)
    end(*threads)
    assert [row["n"] for row, _ in broken.rows] == [0]
    assert [(row["n"], step) for row, step in good.rows] == [(n, 10 * n) for n in range(5)]
    assert good.closed.is_set()
    assert caplog.text.count("logger mine:Broken failed and is switched off (RuntimeError: the service has gone)") == 1
    assert "mine:Good" not in caplog.text
    assert "too slow" not in caplog.text


def test_a_slow_logger_does_not_block_its_caller_and_loses_the_oldest_rows(caplog: pytest.LogCaptureFixture) -> None:
    slow = Recorder()
    slow.gate.clear()
    thread = LoggerThread("mine:Slow", slow)
    for n in range(MOST_WAITING + 50):
        thread.offer({"n": n}, n)
    end(thread, deadline_s=0.0)
    assert "logger mine:Slow did not end within 0 s and is abandoned" in caplog.text
    slow.gate.set()
    assert slow.closed.wait(TIMEOUT_S)
    assert [row["n"] for row, _ in slow.rows][-MOST_WAITING:] == list(range(50, MOST_WAITING + 50))
    assert caplog.text.count("is too slow") == 1


def info(run_dir: Path) -> RunInfo:
    return RunInfo("fleet-1", run_dir, {"sampling": {"env": "CartPole-v1"}})


def log_once(run_dir: Path, name: str) -> None:
    threads = open_loggers(LoggingSection(loggers=[name]), info(run_dir))
    for thread in threads:
        thread.offer(LEARNER_ROW, 64)
    end(*threads)


def test_tensorboard_reads_the_logged_values(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed; pip install 'headrace[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_once(tmp_path, "tensorboard")
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["learner/policy (loss)"]
    (scalar,) = events.Scalars("learner/policy (loss)")
    assert (scalar.wall_time, scalar.step, scalar.value) == (1000.5, 64, -0.25)


def test_a_row_is_in_tensorboards_file_at_once(tmp_path: Path) -> None:
    module = pytest.importorskip(
        "headrace.deploy.annexes.loggers.tensorboard_logger", reason="tensorboard is not installed"
    )
    logger = module.TensorBoardLogger(info(tmp_path))
    for number, row in enumerate((LEARNER_ROW, {**LEARNER_ROW, "learner/second": 1.0})):
        logger.log(row, number)
        (file,) = (tmp_path / "tensorboard").iterdir()
        assert (b"learner/second" in file.read_bytes()) is (number == 1)
        assert b"learner/policy (loss)" in file.read_bytes()
    logger.close()


def test_wandb_writes_a_run_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed; pip install 'headrace[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    log_once(tmp_path, "wandb")
    (written,) = tmp_path.glob("wandb/offline-run-*/run-fleet-1.wandb")
    assert b"learner/policy (loss)" in written.read_bytes()


def test_mlflow_goes_on_with_the_run_of_the_fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed; pip install 'headrace[mlflow]'")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a store that needs no database package
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    for _ in range(2):
        log_once(tmp_path, "mlflow")
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("headrace").experiment_id])
    assert (run.info.status, run.data.params) == ("FINISHED", {"sampling.env": "CartPole-v1"})
    points = client.get_metric_history(run.info.run_id, "learner/policy _loss_")
    assert [(point.value, point.step, point.timestamp) for point in points] == [(-0.25, 64, 1_000_500)] * 2


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_package_is_named_with_the_extra_that_brings_it(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # as Python remembers a package that is not there
    said = rf"logging.loggers: the logger {name} needs {name}: pip install 'headrace\[{name}\]'$"
    with pytest.raises(ConfigError, match=said):
        open_loggers(LoggingSection(loggers=[name]), info(tmp_path))


def test_a_package_that_cannot_be_imported_gives_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """wandb cannot be imported, for instance, beside a NumPy that is too new for it."""
    (tmp_path / "wandb.py").write_text("import numpy\nnumpy.gone")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(ConfigError, match="the logger wandb needs wandb, which cannot be imported: AttributeError"):
        open_loggers(LoggingSection(loggers=["wandb"]), info(tmp_path))


class Unbuildable:
    """A logger that cannot be built."""

    def __init__(self, run: RunInfo) -> None:
        raise PermissionError(f"no account for {run.fleet_id}")


class NoLogger:
    """Something else."""

    def __init__(self, run: RunInfo) -> None:
        pass


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ("Unbuildable", r"cannot be built \(PermissionError: no account for fleet-1\)"),
        ("NoLogger", "has no method log"),
        ("Nothing", "has no 'Nothing'"),
    ],
)
def test_a_logger_that_cannot_be_built_is_an_error_and_leaves_no_thread(
    tmp_path: Path, named: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "my_loggers", sys.modules[__name__])
    threads_before = threading.active_count()
    with pytest.raises(ConfigError, match=says):
        open_loggers(LoggingSection(loggers=[f"my_loggers:{named}"]), info(tmp_path))
    assert threading.active_count() == threads_before


@pytest.mark.parametrize("set_back_before", [1, 4])
def test_rows_of_the_fleet_go_on_when_the_clock_is_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_back_before: int
) -> None:
    """Each report gives one row. A report that was seen, or is of an earlier run, gives none."""
    clock = 10_000.0
    monkeypatch.setattr(run_log, "time", SimpleNamespace(time=lambda: clock, monotonic=time.monotonic))
    config = FleetConfig.model_validate({"logging": {"interval_s": 1e-9}})
    with run_log.RunLog(config, "f", tmp_path) as rows:
        for n in range(1, 8):
            clock += 1.0 if n != set_back_before else -3600.0
            seen = Snapshot(fleet_id="f", reported_unix_s=clock, totals={"env_steps_total": n})
            for _ in range(2):
                rows.observe(seen, {}, [])
        rows.observe(Snapshot(fleet_id="f", reported_unix_s=clock - 2.0), {}, [])
    found = [orjson.loads(line)["env_steps"] for line in (tmp_path / "metrics.jsonl").read_bytes().splitlines()]
    assert found == [1, 2, 3, 4, 5, 6, 7]
