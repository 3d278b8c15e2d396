"""`headrace up` with multi-agent envs that drive themselves: two policies learn, and books balance."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from support.waiting import TIMEOUT_S

pytestmark = pytest.mark.slow

POLICIES = ("--set", 'sampling.policies={"short": {}, "long": {}}')
BREAKING = """
import itertools

from headrace.workers.external.examples import PairsOfCarts

said = itertools.count()
last_words = {500 * 2**n for n in range(20)}  # ever rarer: else no episode of a good policy would end


class Breaking(PairsOfCarts):
    def log_returns(self, episode_id, *news):
        if next(said) in last_words:
            raise RuntimeError("the simulator is gone")
        super().log_returns(episode_id, *news)
"""


@pytest.mark.thorough
def test_two_policies_learn_and_books_balance_though_the_run_ends_mid_episode(tmp_path: Path) -> None:
    (tmp_path / "breaking_carts.py").write_text(BREAKING)
    command = [
        *(sys.executable, "-m", "headrace.deploy", "up", "--run-dir", str(tmp_path / "run"), "--json"),
        *("--timeout-s", "180", "--workers", "1", "--num-envs", "8", "--seed", "0", *POLICIES),
        *("--env", "breaking_carts:Breaking", "--until-return", "120"),
    ]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert result.returncode == 0, result.stderr
    found = orjson.loads(result.stdout)
    assert (found["goal_reached"], found["balanced"]) == (True, True)
    assert found["restarts"]["worker"] == 0
    assert found["env_steps"] < found["steps"]
    assert found["ledger"]["discarded"]["env_exception"] > 0
    assert set(found["ledger"]["discarded"]) <= {"env_exception", "shutdown"}
