"""The other reference learners solve CartPole on a real fleet while a worker of it is killed, and go on later."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from headrace.learner_stub.checkpoints.checkpoint import CHECKPOINT_FILE, load_checkpoint
from support.fleets.running_fleet import RunningFleet

pytestmark = [pytest.mark.chaos, pytest.mark.thorough]


def trained(run_dir: Path, *options: str, kill_at: int) -> dict[str, Any]:
    """Run a fleet to its goal, kill -9 worker 0 after so many further steps, and return what it printed."""
    with RunningFleet(run_dir, "--workers", "2", *options) as fleet:
        fleet.wait_for_steps(kill_at)
        fleet.send(signal.SIGKILL, "worker", 0)
        result = fleet.finish(timeout_s=660.0)
        assert (result["returncode"], result["balanced"]) == (0, True), result["stderr"]
        assert result["restarts"]["worker"] >= 1
        fleet.audited()
    return result


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("algorithm", ["impala", "dqn"])
def test_cartpole_is_learned_though_a_worker_is_killed(tmp_path: Path, algorithm: str, seed: int) -> None:
    sets = (f"learner.algorithm={algorithm}", f"learner.seed={seed}", f"module.config.seed={seed}")
    options = [word for text in sets for word in ("--set", text)]
    result = trained(
        tmp_path,
        "--env",
        "CartPole-v1",
        "--seed",
        str(seed),
        *options,
        "--until-return",
        "475",
        "--timeout-s",
        "600",
        kill_at=10_000,
    )
    assert result["mean_return"] >= 475, (result["mean_return"], result["steps"])


@pytest.mark.parametrize("algorithm", ["impala", "dqn"])
def test_a_run_goes_on_with_the_steps_and_updates_that_it_had(tmp_path: Path, algorithm: str) -> None:
    options = ("--env", "CartPole-v1", "--set", f"learner.algorithm={algorithm}")
    trained(tmp_path, *options, "--until-steps", "20000", kill_at=5_000)
    first = load_checkpoint(tmp_path / CHECKPOINT_FILE)
    with RunningFleet(tmp_path, *options, "--until-steps", "40000") as fleet:
        result = fleet.finish()
        assert (result["returncode"], result["balanced"]) == (0, True), result["stderr"]
        fleet.audited()
    again = load_checkpoint(tmp_path / CHECKPOINT_FILE)
    assert first is not None
    assert again is not None
    assert again.state["updates"] > first.state["updates"]
    assert again.state["steps"] == result["ledger"]["committed"][0] >= first.state["steps"] + 15_000
