"""Envs of other kinds through the whole pipeline: Gaussian actions, Dict observations, images."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.fleets.running_fleet import RunningFleet

pytestmark = pytest.mark.slow


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("env", "arguments"),
    [
        ("support.envs.fleet:sensors", ("--until-steps", "6000")),
        ("support.envs.fleet:pixels", ("--until-steps", "1200", "--set", "learner.steps_per_update=512")),
    ],
)
def test_nested_and_image_observations_train(tmp_path: Path, env: str, arguments: tuple[str, ...]) -> None:
    small = ("--workers", "2", "--num-envs", "2", "--set", "learner.epochs=1")
    with RunningFleet(tmp_path, "--env", env, *small, *arguments) as fleet:
        result = fleet.finish()
    assert result["returncode"] == 0, result["stderr"]
    assert result["weights_seq"] > 1, "the learner made an update and workers went on with it"
    assert result["ledger"]["dropped"] == {}
    assert fleet.audit().returncode == 0


@pytest.mark.thorough
def test_pendulum_learns(tmp_path: Path) -> None:
    """The sign of learning with Gaussian actions: an untrained policy stays near -1,200."""
    settings = ("--set", "learner.gamma=0.9", "--set", "learner.gae_lambda=0.95")
    arguments = ("--workers", "2", "--num-envs", "8", "--env", "Pendulum-v1", "--until-return", "-900", *settings)
    with RunningFleet(tmp_path, *arguments) as fleet:
        result = fleet.finish()
    assert result["returncode"] == 0, result["stderr"]
    assert result["mean_return"] >= -900
    assert fleet.audit().returncode == 0
