"""An env inline may end its worker with any exit code, also with one of ours: no fleet takes that for its own word."""

from __future__ import annotations

import sys
from pathlib import Path

import orjson
import pytest

from headrace.schemas.errors import ExitCode

sys.path.insert(0, str(Path(__file__).parent))

from running_fleet import RunningFleet

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(150)]


def test_an_env_that_exits_with_a_code_of_ours_costs_its_worker_one_life(tmp_path: Path) -> None:
    codes = [ExitCode.RUN_DIR, ExitCode.FENCED]
    env_config = orjson.dumps({"marks": str(tmp_path), "codes": codes}).decode()
    arguments = ("--workers", "2", "--num-envs", "2", "--set", f"sampling.env_config={env_config}")
    with RunningFleet(tmp_path / "run", "--env", "faulty_envs:exits_once", *arguments) as fleet:
        for slot in range(2):
            fleet.wait_for(lambda: fleet.pid("worker", slot=slot, incarnation=2), f"worker {slot}'s second life")  # noqa: B023 - asked at once
        before = fleet.steps()
        fleet.wait_for(lambda: fleet.steps() > before + 1_000, "the fleet goes on")
        fleet.terminate()
        result = fleet.finish()
    assert result["returncode"] == 0, result["stderr"]
    assert result["restarts"]["worker"] == 2
    assert "exit code 7 (RUN_DIR), which it did not announce" in result["stderr"]
    assert "worker_killed" in {**result["ledger"]["discarded"], **result["ledger"]["dropped"]}
    assert set(result["ledger"]["discarded"]) <= {"worker_killed", "shutdown"}
    assert result["balanced"] is True
    assert fleet.audit().returncode == 0
