"""A manager of jobs sends SIGTERM to each process at once, and the fleet still drains in order."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from headrace.deploy.run.fleet_file import read_fleet_file
from support.fleets.running_fleet import RunningFleet

pytestmark = pytest.mark.processes

RUN = ("--workers", "1", "--num-envs", "2", "--set", "learner.steps_per_update=256", "--set", "learner.epochs=1")


@pytest.mark.thorough
def test_sigterm_stops_only_the_supervisor_which_drains_the_fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    with RunningFleet(tmp_path / "run", *RUN) as fleet:
        fleet.wait_until(lambda: weights_seq(fleet) > 1, "the learner trains")
        pids = [process.pid for process in read_fleet_file(tmp_path / "run" / "fleet.json").processes]
        trained = weights_seq(fleet)
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        fleet.wait_until(lambda: weights_seq(fleet) > trained + 5, "the learner trains on")
        assert [process.pid for process in read_fleet_file(tmp_path / "run" / "fleet.json").processes] == pids
        fleet.terminate()
        summary = fleet.finish()
    assert set(summary["restarts"].values()) == {0}, summary
    assert "is killed" not in summary["stderr"]
    fleet.audited()


def weights_seq(fleet: RunningFleet) -> int:
    snapshot = fleet.snapshot()
    return int(snapshot.gauges.get("weights_seq", 0)) if snapshot else 0
