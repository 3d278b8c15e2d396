"""A fleet whose broker serves on Unix sockets trains, lives through kills, and its books balance."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from support.fleets.running_fleet import RunningFleet

pytestmark = pytest.mark.chaos


def test_kills_of_worker_and_broker_are_survived_on_unix_sockets(tmp_path: Path) -> None:
    with RunningFleet(tmp_path, "--workers", "2", "--num-envs", "8", "--set", "broker.transport=ipc") as fleet:
        for role in ("broker", "worker"):
            fleet.wait_for_steps(3_000)
            assert fleet.endpoint("worker") == f"ipc://{tmp_path}/ipc/worker"
            fleet.send(signal.SIGKILL, role)
        fleet.wait_for_steps(3_000)
        fleet.terminate()
        result = fleet.finish()
    assert (result["returncode"], result["balanced"]) == (0, True), result["stderr"]
    assert result["restarts"] == {"worker": 1, "broker": 1, "learner": 0, "redis": 0}
    assert "token" not in result["stderr"], "no process asks for one, or warns that none is asked for"
    fleet.audited()
