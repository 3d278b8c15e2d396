"""A process that stood still goes on, and a fleet names the batches that an earlier one left in its run directory."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import orjson
import pytest

from support.fleets.running_fleet import RunningFleet, redis_in

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
def test_rows_of_a_learner_outlive_it_and_the_broker_while_redis_is_away_for_good(tmp_path: Path) -> None:
    run = tmp_path / "run"
    waiting, logged = run / "learner_rows.jsonl", run / "metrics.jsonl"

    def rows() -> list[str]:
        found = (orjson.loads(line) for line in logged.read_bytes().splitlines())
        return [row["learner_row"] for row in found if row["kind"] == "learner"]

    def kept() -> list[str]:
        found = (orjson.loads(line)["row"] for line in waiting.read_bytes().splitlines() if line.endswith(b"}"))
        return [f"{row['epoch']}-{row['number']}" for row in found]

    with (
        redis_in(tmp_path / "elsewhere") as (url, server),
        RunningFleet(run, *SMALL, "--set", "learner.steps_per_update=512", "--redis-url", url) as fleet,
    ):
        fleet.wait_until(lambda: logged.exists() and len(rows()) > 2, "rows of the learner")
        server.kill()
        fleet.wait_until(lambda: waiting.exists() and len(kept()) > 3, "rows that wait for Redis")
        learner, broker = fleet.pid("learner"), fleet.pid("broker")
        fleet.send(signal.SIGKILL, "broker")
        fleet.send(signal.SIGKILL, "learner")
        before = kept()
        fleet.wait_until(lambda: fleet.pid("learner") not in (None, learner), "the next learner")
        fleet.wait_until(lambda: fleet.pid("broker") not in (None, broker), "the next broker")
        fleet.wait_until(
            lambda: kept()[-1].partition("-")[0] != before[-1].partition("-")[0], "a row of the next learner"
        )
        assert set(before) <= set(kept())
        fleet.terminate()
        result = fleet.finish()
    assert result["returncode"] == 0, result["stderr"]
    order = [tuple(map(int, row.split("-"))) for row in rows()]
    assert order == sorted(set(order)), "each row once, and in order"
    assert set(before) <= set(rows())
    assert set(kept()) <= set(rows()), "what waits still is logged too"


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
