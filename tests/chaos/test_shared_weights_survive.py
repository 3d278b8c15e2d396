"""A fleet whose large weights lie in this machine's memory goes on after kills, and leaves nothing there."""

from __future__ import annotations

import signal
from pathlib import Path

import orjson
import pytest

from headrace.schemas.messages.shared_weights import SharedWeights
from support.fleets.running_fleet import RunningFleet

pytestmark = pytest.mark.chaos

LARGE = ("--set", 'module.config={"hidden": [600, 600]}', "--set", "learner.epochs=1")
"""1.5 MB of weights."""


def test_a_fleet_with_shared_weights_survives_kills_of_broker_and_worker(tmp_path: Path) -> None:
    with RunningFleet(tmp_path, "--workers", "2", "--num-envs", "8", *LARGE) as fleet:
        fleet.wait_until(lambda: fleet.steps() > 2_000, "training has begun")
        shared = SharedWeights(orjson.loads((tmp_path / "fleet.json").read_bytes())["fleet_id"])._memory.path
        for role, slot in (("broker", None), ("worker", 0), ("broker", None)):
            fleet.wait_until(lambda: list(shared.glob("[0-9]*-*")), "weights in memory")
            killed = fleet.send(signal.SIGKILL, role, slot)
            fleet.wait_until(lambda k=killed, r=role: fleet.pid(r) not in (None, k), f"a new {role}")
            fleet.wait_for_steps(1_000)
        fleet.terminate()
        result = fleet.finish()
    assert (result["returncode"], result["balanced"]) == (0, True), result["stderr"]
    assert not shared.exists()
    audit = fleet.audit()
    assert audit.returncode == 0, audit.stdout + audit.stderr
