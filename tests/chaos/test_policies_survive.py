"""The reference learner in a real fleet: several policies, and connectors that count each row once despite kills."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.learner_stub.checkpoints.checkpoint import Checkpoint, load_checkpoint
from headrace.learner_stub.reference.training import CHECKPOINT_FILE
from support.fleets.running_fleet import RunningFleet

pytestmark = pytest.mark.chaos

MEAN_STD = '["headrace.workers.connectors:MeanStd"]'
ROWS = "connectors/env_to_module/0.MeanStd/obs/count"
WORKERS, NUM_ENVS = 2, 4
SMALL = ("--workers", str(WORKERS), "--num-envs", str(NUM_ENVS), "--set", "learner.steps_per_update=1024")


def _after_kills(fleet: RunningFleet, steps: int) -> dict[str, Any]:
    """Learner and broker are killed while it trains for at least `steps`; what the fleet says at its end."""
    for role in ("learner", "broker"):
        fleet.wait_for_steps(3_000)
        fleet.send(signal.SIGKILL, role)
    fleet.wait_for_steps(3_000)
    fleet.wait_until(lambda: fleet.steps() > steps, f"{steps:,} steps")
    fleet.terminate()
    return fleet.finish()


def _checkpoint(fleet: RunningFleet, result: dict[str, Any]) -> Checkpoint:
    assert (result["returncode"], result["balanced"]) == (0, True), result["stderr"]
    assert result["restarts"] == {"worker": 0, "broker": 1, "learner": 1, "redis": 0}
    saved = load_checkpoint(fleet.run_dir / CHECKPOINT_FILE)
    assert saved is not None
    return saved


@pytest.mark.thorough
def test_a_connector_counts_each_row_once_despite_kills_of_learner_and_broker(tmp_path: Path) -> None:
    with RunningFleet(tmp_path, *SMALL, "--set", f"sampling.env_to_module={MEAN_STD}") as fleet:
        saved = _checkpoint(fleet, _after_kills(fleet, 16_000))
    # An observation for each step, one more for each episode that has begun, of which one goes on in each env.
    seen = saved.state["steps"] + saved.state["episodes"] + WORKERS * NUM_ENVS
    assert saved.arrays[ROWS].tolist() == [seen]


@pytest.mark.thorough
def test_two_policies_are_trained_despite_kills_of_learner_and_broker(tmp_path: Path) -> None:
    policies = f'{{"short": {{}}, "long": {{"env_to_module": {MEAN_STD}}}}}'
    arguments = ("--env", "headrace.workers.agents.examples:two_carts", "--set", f"sampling.policies={policies}")
    with RunningFleet(tmp_path, *SMALL, *arguments) as fleet:
        saved = _checkpoint(fleet, _after_kills(fleet, 20_000))
    short, long = saved.state["modules"]["short"], saved.state["modules"]["long"]
    assert short["updates"] == long["updates"] >= 10
    # At random they are some 21 and 40.
    assert np.mean(short["recent_returns"]) > 26
    assert np.mean(long["recent_returns"]) > 46
    finished = long["steps"] + long["episodes"]
    assert finished <= int(saved.arrays[f"modules/long/{ROWS}"][0]) <= finished + WORKERS * NUM_ENVS
    assert f"modules/short/{ROWS}" not in saved.arrays
