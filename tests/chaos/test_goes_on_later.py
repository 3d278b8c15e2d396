"""A process that stood still goes on, and a fleet names the batches that an earlier one left in its run directory."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest

from support.fleets.running_fleet import RunningFleet

pytestmark = pytest.mark.chaos

SETTINGS = ("broker.lease_s=1.5", "broker.heartbeat_interval_s=0.3", "learner.epochs=1")
SMALL = ("--workers", "2", "--num-envs", "8", *(word for setting in SETTINGS for word in ("--set", setting)))
HANG_S = 1.0
"""Less than a lease. A process that stands still for longer is replaced."""


@pytest.mark.thorough
@pytest.mark.parametrize("role", ["broker", "learner"])
def test_a_process_that_hangs_for_less_than_its_lease_loses_no_batch(tmp_path: Path, role: str) -> None:
    with RunningFleet(tmp_path, *SMALL, "--until-steps", "60000") as fleet:
        fleet.wait_until(lambda: fleet.steps() > 3_000, "training has begun")
        fleet.send(signal.SIGSTOP, role)
        threading.Event().wait(HANG_S)
        before = fleet.steps()
        fleet.send(signal.SIGCONT, role)
        fleet.wait_until(lambda: fleet.steps() > before + 5_000, "the fleet goes on")
        result = fleet.finish()
    assert (result["returncode"], result["goal_reached"], result["balanced"]) == (0, True, True), result["stderr"]
    assert (result["ledger"]["dropped"], result["ledger"]["queued"]) == ({}, 0)
    assert fleet.audit().returncode == 0


@pytest.mark.thorough
def test_the_next_fleet_reports_batches_that_no_learner_took_as_broker_lost(tmp_path: Path) -> None:
    alone = ("--set", "learner.enabled=false", "--set", "worker.random_actions_before_weights=true")
    with RunningFleet(tmp_path, *SMALL, *alone, "--until-steps", "4000") as fleet:
        first = fleet.finish()
    assert first["balanced"] is True
    queued = first["ledger"]["queued"]
    assert queued == first["ledger"]["stepped"] > 0
    assert list((tmp_path / "recorders").iterdir()), "of each worker that has sampled before all was"
    with RunningFleet(tmp_path, *SMALL, "--until-steps", "20000") as fleet:
        second = fleet.finish()
    assert second["ledger"]["queued"] == 0, "nobody has those batches any more"
    assert second["ledger"]["dropped"]["broker_lost"][0] == queued
    assert list((tmp_path / "recorders").iterdir()) == []
    audit = fleet.audit()
    assert audit.returncode == 0, audit.stdout + audit.stderr


def test_the_next_supervisor_closes_the_books_of_a_killed_supervisor(tmp_path: Path) -> None:
    with RunningFleet(tmp_path, *SMALL) as fleet:
        fleet.wait_until(lambda: fleet.steps() > 5_000, "training has begun")
        reached = fleet.steps()
        fleet.kill()
    with RunningFleet(tmp_path, *SMALL, "--until-steps", str(reached + 5_000)) as fleet:
        result = fleet.finish()
    assert (result["returncode"], result["balanced"]) == (0, True), result["stderr"]
    assert result["ledger"]["queued"] == 0
    assert list((tmp_path / "recorders").iterdir()) == []
    audit = fleet.audit()
    assert audit.returncode == 0, audit.stdout + audit.stderr
