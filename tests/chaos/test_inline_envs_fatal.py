"""What inline envs do to the worker that they live in. Most of it costs the env at most.

A worker whose process an env ends or hangs is replaced. The fleet goes on, and the books name what was lost.
"""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from support.envs.fleet import KINDS, ODD
from support.fleets.running_fleet import RunningFleet

pytestmark = pytest.mark.chaos


@pytest.mark.thorough
def test_workers_killed_by_inline_envs_are_replaced_and_lost_steps_are_counted(tmp_path: Path) -> None:
    """One env segfaults, one hangs, one calls os._exit with a code that would end the fleet if it were announced."""
    env_config = orjson.dumps({"marks": str(tmp_path)}).decode()
    config = {
        "sampling.env_config": env_config,
        "sampling.env_step_timeout_s": "1.0",
        "broker.lease_s": "2.0",
        "supervisor.zombie_grace_s": "0.5",
    }
    settings = [word for key, value in config.items() for word in ("--set", f"{key}={value}")]
    arguments = ("--env", "support.envs.fleet:fatal_once", "--workers", "3", "--num-envs", "2")
    with RunningFleet(tmp_path / "run", *arguments, *settings) as fleet:
        for slot in range(3):
            fleet.wait_until(lambda: fleet.pid("worker", slot=slot, incarnation=2), f"worker {slot}'s second life")  # noqa: B023 - asked at once
        before = fleet.steps()
        fleet.wait_until(lambda: fleet.steps() > before + 4_000, "the fleet goes on")
        fleet.terminate()
        result = fleet.finish()
    assert result["returncode"] == 0, result["stderr"]
    assert result["restarts"]["worker"] == 3
    assert "has been in step for" in result["stderr"]
    assert "exit code 7 (RUN_DIR), which it did not announce" in result["stderr"]
    ledger = result["ledger"]
    lost = ledger["discarded"].get("worker_killed", 0) + ledger["dropped"].get("worker_killed", (0, 0))[0]
    late = ledger["discarded"].get("fenced", 0) + ledger["dropped"].get("fenced", (0, 0))[0]
    assert 0 < lost + late < 5_000, "what was under way in each life that ended, and no more"
    assert set(ledger["discarded"]) <= {"worker_killed", "fenced", "shutdown"}
    assert result["balanced"] is True
    assert fleet.audit().returncode == 0


def test_a_worker_outlives_an_inline_env_of_each_kind(tmp_path: Path) -> None:
    """`sys.exit`, a BaseException of a library, a late signal, a fork, leaks, other process state, odd answers."""
    width = len(KINDS) + len(ODD)
    arguments = ("--env", "support.envs.fleet:one_of_each_kind", "--workers", "1", "--num-envs", str(width))
    small = ("--no-check-env", "--set", "learner.epochs=1", "--until-steps", str(500 * width))
    with RunningFleet(tmp_path / "run", *arguments, *small) as fleet:
        result = fleet.finish()
    assert result["returncode"] == 0, result["stderr"]
    assert result["restarts"]["worker"] == 0
    assert "ignored SIGTERM" not in result["stderr"]
    assert (
        {"env_exception", "env_bad_data"}
        <= set(result["ledger"]["discarded"])
        <= {
            "env_exception",
            "env_bad_data",
            "shutdown",
        }
    )
    assert result["balanced"] is True
    fleet.audited()
