"""A fleet that starts its own env hosts, with keys, goes on after an env host and its worker were killed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from headrace.deploy.run.fleet_file import read_fleet_file
from headrace.deploy.run.key_pairs import make_keys
from support.fleets.running_fleet import RunningFleet

pytestmark = pytest.mark.chaos


@pytest.mark.thorough
def test_a_killed_env_host_and_a_killed_worker_are_restarted_and_reconnect(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    settings = {
        "sampling.env_placement": "remote",
        "broker.lease_s": "4",
        "sampling.remote_env_batch_wait_ms": "1",
        "broker.host": "127.0.0.1",
        "keys.dir": tmp_path / "keys",
    }
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    run_dir = tmp_path / "run"
    with RunningFleet(run_dir, "--workers", "1", "--env-hosts", "2", "--num-envs", "4", *sets) as fleet:
        fleet.wait_until(lambda: _accepted(fleet, 0, 1), "the worker delivers")
        endpoints = read_fleet_file(run_dir / "fleet.json").endpoints
        assert endpoints["envs-0"].startswith("tcp://127.0.0.1:")
        fleet.send(signal.SIGKILL, "env-host")
        fleet.send(signal.SIGKILL, "worker")
        fleet.wait_until(lambda: _accepted(fleet, 0, 2), "the worker's second life delivers")
        before = fleet.steps()
        fleet.wait_until(lambda: fleet.steps() > before + 3_000, "the fleet goes on")
        page = read_fleet_file(run_dir / "fleet.json")
        assert page.endpoints == endpoints, "a worker that comes back is found where it was"
        assert [p.name for p in page.processes if p.role == "env-host"] == ["env-host-0", "env-host-1"]
        fleet.terminate()
        result = fleet.finish()
    assert result["returncode"] == 0, result["stderr"]
    assert (result["restarts"]["env-host"], result["restarts"]["worker"]) == (1, 1)
    assert set(result["ledger"]["discarded"]) <= {"env_host_lost", "worker_killed", "shutdown"}
    assert result["balanced"] is True
    assert fleet.audit().returncode == 0


def _accepted(fleet: RunningFleet, slot: int, incarnation: int) -> bool:
    snapshot = fleet.snapshot()
    row = snapshot.rows.get((slot, incarnation)) if snapshot else None
    return row is not None and row.accepted[0] > 0
