"""A fleet that listens by TCP with keys trains, lives through kills, and its books balance."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from support.fleets.running_fleet import RunningFleet

pytestmark = pytest.mark.chaos


def test_kills_of_worker_and_broker_are_survived_on_tcp_with_keys(tmp_path: Path) -> None:
    with RunningFleet(tmp_path, "--workers", "2", "--num-envs", "8", "--listen", "127.0.0.1") as fleet:
        for role in ("broker", "worker"):
            fleet.wait_for_steps(3_000)
            assert fleet.endpoint("worker").startswith("tcp://127.0.0.1:")
            fleet.send(signal.SIGKILL, role)
        fleet.wait_for_steps(3_000)
        fleet.terminate()
        result = fleet.finish()
    assert (result["returncode"], result["balanced"]) == (0, True), result["stderr"]
    assert result["restarts"] == {"worker": 1, "broker": 1, "learner": 0, "redis": 0}
    assert (tmp_path / "keys" / "broker.secret").exists()
    assert not (tmp_path / "ipc").exists(), "it has no second door"
    assert "without keys" not in result["stderr"]
    fleet.audited()
