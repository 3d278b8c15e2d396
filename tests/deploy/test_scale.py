"""`headrace scale`: a run that goes on with more workers, or fewer, and books that stay exact."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from headrace.deploy.fleet.scale import asked_workers, scale
from headrace.deploy.process.fleet_errors import FleetError
from headrace.deploy.run.fleet_file import FleetFile
from headrace.schemas.settings.config_loading import build_config
from support.fleets.running_fleet import RunningFleet
from support.waiting import TIMEOUT_S


def headrace_scale(run_dir: Path, workers: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headrace.deploy", "scale", workers, "--run-dir", str(run_dir)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)


@pytest.mark.thorough
@pytest.mark.slow
def test_scale_adds_and_removes_workers_of_a_running_fleet(tmp_path: Path) -> None:
    with RunningFleet(tmp_path, "--env", "CartPole-v1", "--workers", "1", "--num-envs", "4") as fleet:
        fleet.wait_until(lambda: fleet.steps() > 0, "steps")
        grown = headrace_scale(tmp_path, "3")
        assert grown.returncode == 0, grown.stderr
        assert grown.stdout.splitlines()[0].endswith("1 workers run, 3 are asked for")
        fleet.wait_until(lambda: {0, 1, 2} <= _sampling(fleet), "steps of each worker")
        shrunk = headrace_scale(tmp_path, "1")
        assert shrunk.returncode == 0, shrunk.stderr
        assert fleet.pid("worker", 0) is not None
        assert fleet.pid("worker", 2) is None
        again = headrace_scale(tmp_path, "2")
        assert again.returncode == 0, again.stderr
        fleet.wait_until(lambda: fleet.pid("worker", 1, incarnation=2), "the second life of a slot")
        steps = fleet.steps()
        fleet.wait_until(lambda: fleet.steps() > steps + 1000, "progress")
        fleet.terminate()
        result = fleet.finish()
        assert result["returncode"] == 0, result["stderr"]
        assert result["restarts"]["worker"] == 0
        assert result["ledger"]["queued"] == 0
        audited = fleet.audit()
        assert audited.returncode == 0, audited.stdout + audited.stderr
    over = headrace_scale(tmp_path, "2")
    assert over.returncode == 1
    assert f"it is stopped); headrace up --resume {tmp_path}" in over.stderr


def _sampling(fleet: RunningFleet) -> set[int]:
    snapshot = fleet.snapshot()
    return {slot for (slot, _), row in snapshot.rows.items() if row.totals.stepped} if snapshot else set()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"sampling": {"synchronous": True}}, r"synchronous = true needs a fixed number"),
        ({"sampling": {"env_placement": "remote"}}, r"has ports for 2 workers"),
        (
            {"worker": {"window_batches": 1}, "learner": {"steps_per_update": 1024}},
            "1 workers and the learner would wait",
        ),
        ({"broker": {"max_held_batches": 5}}, "3 workers and the learner would wait for each other"),
    ],
)
def test_scale_refuses_a_number_of_workers_that_a_run_cannot_have(
    tmp_path: Path, settings: dict[str, object], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.deploy.fleet.scale.is_alive", lambda pid: True)
    FleetFile(fleet_id="demo", state="running").write(tmp_path / "fleet.json")
    config = build_config({"fleet": {"workers": 2}, **settings})
    (tmp_path / "config.json").write_bytes(orjson.dumps(config.model_dump(mode="json")))
    with pytest.raises(FleetError, match=said):
        scale(tmp_path, 1 if "worker" in settings else 3, print)
    assert asked_workers(tmp_path) is None


@pytest.mark.parametrize("content", [b"", b"{}", b'{"workers": -1}', b'{"workers": 1e3}', b'{"workers": 10000}', b"3"])
def test_a_workers_file_without_a_valid_number_is_ignored(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "workers.json").write_bytes(content)
    assert asked_workers(tmp_path) is None
