"""A fleet whose broker serves on Unix sockets trains, lives through kills, and its books balance."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from support.fleets.running_fleet import RunningFleet

pytestmark = pytest.mark.chaos


def test_kills_of_worker_and_broker_are_survived_on_unix_sockets(tmp_path: Path) -> None:
    arguments = ("--workers", "2", "--num-envs", "8", "--until-steps", "12000", "--set", "broker.transport=ipc")
    with RunningFleet(tmp_path, *arguments) as fleet:
        reached = 3_000
        for role in ("broker", "worker"):
            fleet.wait_until(lambda: fleet.steps() > reached, f"{reached} steps")  # noqa: B023 - asked at once
            assert fleet.endpoint("worker") == f"ipc://{tmp_path}/ipc/worker"
            fleet.send(signal.SIGKILL, role)
            reached += 3_000
        result = fleet.finish()
    assert result["returncode"] == 0, result["stderr"]
    assert result["goal_reached"] is True
    assert result["restarts"] == {"worker": 1, "broker": 1, "learner": 0, "redis": 0}
    assert "token" not in result["stderr"], "no process asks for one, or warns that none is asked for"
    fleet.audited()
