"""The rows of a run in two files and in loggers, seen from outside: they equal the summary and Redis."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from headrace.deploy.report.audit import find_books
from headrace.deploy.run.fleet_file import read_fleet_file
from headrace.deploy.run.redis_server import serving
from headrace.deploy.run.redis_view import FleetView, LearnerRowView, Snapshot
from headrace.schemas.errors import ExitCode
from support.waiting import TIMEOUT_S, wait_until

pytestmark = pytest.mark.slow

MINE = """
class Counting:
    def on_episode_end(self, episode, metrics_logger):
        metrics_logger.log_value("episodes", 1, reduce="sum")
        metrics_logger.log_value(("steps", "longest"), len(episode), reduce="max")

class Keeps:
    def __init__(self, run):
        assert "url" not in run.config["redis"]
        self.file = (run.run_dir / "mine.txt").open("w")
    def log(self, row, step):
        print(row["kind"], step, len(row), file=self.file)
    def close(self):
        print("closed", file=self.file, flush=True)

class Fails:
    def __init__(self, run):
        pass
    def log(self, row, step):
        raise ConnectionError("no route to my server")
    def close(self):
        pass
"""
SMALL = ("--workers", "2", "--num-envs", "2", "--seed", "0", "--timeout-s", "180", "--json")
OFTEN = ("--set", "logging.interval_s=0.5", "--set", "learner.steps_per_update=256", "--set", "learner.epochs=1")
PPO_FIGURES = (
    *("loss", "policy_loss", "value_loss", "entropy", "kl", "clip_fraction", "explained_variance", "learning_rate"),
    *("behaviour_kl", "epochs"),
)
TWO_POLICIES = (
    *("--env", "headrace.workers.agents.examples:two_carts"),
    *("--set", 'sampling.policies={"short": {}, "long": {}}'),
    *("--set", 'sampling.callbacks=["mine:Counting"]'),
)


def command(run_dir: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "headrace.deploy", "up", "--run-dir", str(run_dir), *SMALL, *OFTEN, *arguments]


def up(run_dir: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """The summary of a run that must end well, and what it said."""
    (run_dir / "mine.py").write_text(MINE)
    done = subprocess.run(
        command(run_dir, *arguments), cwd=run_dir, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr
    summary: dict[str, Any] = orjson.loads(done.stdout)
    return summary, done.stderr


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in (run_dir / "metrics.jsonl").read_bytes().splitlines()]


def in_redis(run_dir: Path) -> tuple[Snapshot, list[LearnerRowView]]:
    url, fleet_id = find_books(run_dir)
    with serving(run_dir, url), FleetView(url, fleet_id) as view:
        return view.read(), view.learner_rows()


def test_rows_agree_with_the_summary_with_redis_and_with_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed; pip install 'headrace[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    mine = ("--logger", "mine:Keeps", "--logger", "mine:Fails", "--logger", "tensorboard")
    summary, said = up(tmp_path, *TWO_POLICIES, *mine, "--until-steps", "3000")
    rows = rows_of(tmp_path)
    of_fleet = [row for row in rows if row["kind"] == "fleet"]
    of_learner = [row for row in rows if row["kind"] == "learner"]
    last = of_fleet[-1]

    assert len(of_fleet) >= 2
    assert (last["env_steps"], last["agent_steps"]) == (summary["env_steps"], summary["steps"])
    assert (last["episodes"], last["weights_seq"]) == (summary["episodes"], summary["weights_seq"])
    assert last["callbacks/episodes"] == summary["episodes"]
    assert last["callbacks/steps/longest"] >= last["episode_len_max"]
    assert set(summary["mean_returns"]) == {"short", "long"}
    assert last["policies/short/return_min"] <= last["policies/short/return_mean"] <= last["episode_return_max"]
    assert [row["time"] for row in of_fleet] == sorted(row["time"] for row in of_fleet)

    snapshot, stored = in_redis(tmp_path)
    assert [row["learner_row"] for row in of_learner] == [f"{view.epoch}-{view.number}" for view in stored]
    for row, view in zip(of_learner, stored, strict=True):
        assert {f"learner/{name}": value for name, value in view.values.items()}.items() <= row.items()
    assert {"learner/update", "learner/long/entropy"} <= of_learner[0].keys()
    assert {f"learner/short/{name}" for name in PPO_FIGURES} <= of_learner[0].keys()
    assert [row["learner/update"] for row in of_learner] == list(range(1, len(of_learner) + 1))
    assert {name: metric.value for name, metric in snapshot.metrics.items()} == {
        "episodes": last["callbacks/episodes"],
        "steps/longest": last["callbacks/steps/longest"],
    }
    for module_id, returns in snapshot.policies.items():
        assert last[f"policies/{module_id}/return_mean"] == returns["return_mean"]

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    losses = events.Scalars("learner/short/policy_loss")
    trained = [row for row in of_learner if "learner/short/policy_loss" in row]
    assert [scalar.step for scalar in losses] == [row["env_steps"] for row in trained]
    assert [scalar.value for scalar in losses] == pytest.approx([row["learner/short/policy_loss"] for row in trained])
    assert events.Scalars("callbacks/episodes")[-1].value == summary["episodes"]

    kept = (tmp_path / "mine.txt").read_text().splitlines()
    assert kept == [f"{row['kind']} {row['env_steps']} {len(row)}" for row in rows] + ["closed"]
    assert said.count("logger mine:Fails failed and is switched off (ConnectionError: no route to my server)") == 1


def test_a_missing_logger_is_an_error_before_the_fleet_starts(tmp_path: Path) -> None:
    done = subprocess.run(
        command(tmp_path, "--set", 'logging.loggers=["nowhere:Logger"]'),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == ExitCode.CONFIG
    assert "logging.loggers: module 'nowhere' cannot be imported" in done.stderr
    assert not (tmp_path / "logs" / "redis.log").exists()


@pytest.mark.thorough
def test_rows_go_on_after_the_death_of_learner_and_supervisor(tmp_path: Path) -> None:
    def pid_of(name: str) -> int:
        return next(p.pid for p in read_fleet_file(tmp_path / "fleet.json").processes if p.name == name)

    def learner_rows(epoch: int) -> list[dict[str, Any]]:
        path = tmp_path / "metrics.jsonl"
        rows = rows_of(tmp_path) if path.exists() else []
        return [row for row in rows if row["kind"] == "learner" and row["learner_epoch"] == epoch]

    with subprocess.Popen(
        command(tmp_path), cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as supervisor:
        wait_until(lambda: len(learner_rows(1)) >= 3, "rows of the first learner")
        os.kill(pid_of("learner"), signal.SIGKILL)
        wait_until(lambda: len(learner_rows(2)) >= 3, "rows of the second learner")
        supervisor.kill()
    before = (tmp_path / "metrics.jsonl").read_bytes()
    steps = max(row["env_steps"] for row in rows_of(tmp_path))
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"kind": "fle')  # as a machine that went down

    up(tmp_path, "--until-steps", str(steps + 10_000))
    assert (tmp_path / "metrics.jsonl").read_bytes().startswith(before), "rows of before are gone"
    rows = rows_of(tmp_path)
    of_learner = [row for row in rows if row["kind"] == "learner"]
    names = [row["learner_row"] for row in of_learner]
    _, stored = in_redis(tmp_path)
    assert names == [f"{view.epoch}-{view.number}" for view in stored], "a row is lost, twice, or out of order"
    assert {row["learner_epoch"] for row in of_learner} == {1, 2, 3}
    assert rows[-1]["env_steps"] > steps
