"""`headrace up` with an env that drives itself: the fleet learns, and its books balance."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from support.waiting import TIMEOUT_S

pytestmark = pytest.mark.slow


def test_a_fleet_learns_from_envs_that_drive_themselves(tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "headrace.deploy", "up", "--run-dir", str(tmp_path), "--json", "--timeout-s", "180"),
        *("--env", "headrace.workers.external.examples:CartPoles", "--workers", "1", "--num-envs", "8"),
        *("--seed", "0", "--until-return", "150"),
    ]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert result.returncode == 0, result.stderr
    found = orjson.loads(result.stdout)
    assert found["goal_reached"] is True
    assert found["balanced"] is True
    assert found["restarts"]["worker"] == 0
    assert set(found["ledger"]["discarded"]) <= {"shutdown"}
