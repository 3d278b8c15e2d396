"""A fleet whose envs crash and hang in processes of their own: no worker is lost, and the books name every step."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from support.fleets.running_fleet import RunningFleet

pytestmark = [pytest.mark.chaos, pytest.mark.thorough]


def test_envs_that_segfault_and_hang_cost_no_worker(tmp_path: Path) -> None:
    placement = ("env_placement=process", "envs_per_process=2", "env_step_timeout_s=1.0", "env_restart_attempts=100")
    settings = [word for setting in placement for word in ("--set", f"sampling.{setting}")]
    arguments = ("--env", "support.envs.fleet:some_crash_and_hang", "--workers", "1", "--num-envs", "4")
    with RunningFleet(tmp_path, *arguments, *settings, "--until-steps", "6000") as fleet:
        result = fleet.finish()
    assert result["returncode"] == 0, result["stderr"]
    assert result["restarts"].get("worker", 0) == 0
    assert {"env_crash", "env_hang"} <= result["ledger"]["discarded"].keys()
    assert fleet.audit().returncode == 0


def test_a_killed_process_of_multi_agent_envs_costs_no_worker(tmp_path: Path) -> None:
    settings = ('policies={"short": {}, "long": {}}', "env_placement=process", "envs_per_process=2")
    settings += ("rollout_fragment_length=1000",)  # a kill right after a cut would have nothing to lose
    words = [word for setting in settings for word in ("--set", f"sampling.{setting}")]
    words += ["--set", "worker.window_batches=64"]  # nor has a worker that waits for the learner
    arguments = ("--env", "headrace.workers.agents.examples:two_carts", "--workers", "1", "--num-envs", "4")
    with RunningFleet(tmp_path, *arguments, *words, "--until-steps", "20000") as fleet:
        fleet.wait_until(lambda: fleet.steps() > 500, "steps")
        worker = fleet.pid("worker")
        children = Path(f"/proc/{worker}/task/{worker}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)
        result = fleet.finish()
    assert result["returncode"] == 0, result["stderr"]
    assert result["restarts"].get("worker", 0) == 0
    assert result["ledger"]["discarded"]["env_crash"] > 0
    assert fleet.audit().returncode == 0
