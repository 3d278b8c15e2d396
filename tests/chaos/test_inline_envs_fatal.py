"""What inline envs do to the worker that they live in. Most of it costs the env at most.

A worker whose process an env ends or hangs is replaced. The fleet goes on, and the books name what was lost.
"""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from support.envs.fleet import FATAL, KINDS, ODD, WORSE
from support.fleets.running_fleet import RunningFleet

pytestmark = pytest.mark.chaos


@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(["kills itself"], id="one"),
        pytest.param(list(FATAL)[:5], id="first half", marks=pytest.mark.thorough),
        pytest.param(list(FATAL)[5:], id="second half", marks=pytest.mark.thorough),
    ],
)
def test_workers_killed_by_inline_envs_are_replaced_and_lost_steps_are_counted(
    tmp_path: Path, kinds: list[str]
) -> None:
    """Envs segfault, hang, or call os._exit, one with a code that would end the fleet if it were announced."""
    env_config = orjson.dumps({"marks": str(tmp_path), "kinds": kinds}).decode()
    config = {
        "sampling.env_config": env_config,
        "sampling.env_step_timeout_s": "1.0",
        "broker.lease_s": "2.0",
    }
    settings = [word for key, value in config.items() for word in ("--set", f"{key}={value}")]
    arguments = ("--env", "support.envs.fleet:fatal_once", "--workers", str(len(kinds)), "--num-envs", "2")
    with RunningFleet(tmp_path / "run", *arguments, *settings) as fleet:
        for slot in range(len(kinds)):
            fleet.wait_until(lambda: fleet.pid("worker", slot=slot, incarnation=2), f"worker {slot}'s second life")  # noqa: B023 - asked at once
        before = fleet.steps()
        fleet.wait_until(lambda: fleet.steps() > before + 1_000, "the fleet goes on")
        fleet.terminate()
        result = fleet.finish()
    assert result["returncode"] == 0, result["stderr"]
    assert result["restarts"]["worker"] >= len(kinds)
    if "hangs" in kinds:
        assert "has been in step for" in result["stderr"]
        for end in ("exit code 7 (RUN_DIR)", "exit code 0 (OK)"):
            assert f"{end}, which it did not announce: an env or module of yours ended it" in result["stderr"]
    ledger = result["ledger"]
    lost = ledger["discarded"].get("worker_killed", 0) + ledger["dropped"].get("worker_killed", (0, 0))[0]
    late = ledger["discarded"].get("fenced", 0) + ledger["dropped"].get("fenced", (0, 0))[0]
    assert 0 < lost + late < 1_700 * len(kinds), "what was under way in each life that ended, and no more"
    assert set(ledger["discarded"]) <= {"worker_killed", "fenced", "shutdown"}
    assert result["balanced"] is True
    assert fleet.audit().returncode == 0


def test_a_worker_outlives_an_inline_env_of_each_kind(tmp_path: Path) -> None:
    """`sys.exit`, a BaseException of a library, a late signal, a fork, leaks, other process state, odd answers."""
    width = len(KINDS) + len(ODD)
    arguments = ("--env", "support.envs.fleet:one_of_each_kind", "--workers", "1", "--num-envs", str(width))
    small = ("--no-check-env", "--set", "learner.epochs=1", "--until-steps", str(220 * width))
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


@pytest.mark.thorough
@pytest.mark.parametrize("kinds", [list(WORSE)[:8], list(WORSE)[8:]], ids=["first half", "second half"])
def test_a_fleet_goes_on_with_inline_envs_of_worse_kinds(tmp_path: Path, kinds: list[str]) -> None:
    env_config = orjson.dumps({"kinds": ["sound", *kinds]}).decode()
    width = str(len(kinds) + 1)
    arguments = ("--env", "support.envs.fleet:one_of_each_kind", "--workers", "1", "--num-envs", width)
    small = ("--set", "learner.epochs=1", "--set", f"sampling.env_config={env_config}", "--until-steps", "2000")
    with RunningFleet(tmp_path / "run", *arguments, *small) as fleet:
        result = fleet.finish()
    assert result["returncode"] == 0, result["stderr"]
    assert result["balanced"] is True
    fleet.audited()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kinds", "reasons"),
    [
        pytest.param(list(FATAL), {"env_crash"}, id="fatal"),
        pytest.param([*KINDS, *WORSE], {"env_exception"}, id="kinds"),
        pytest.param(list(ODD), {"env_bad_data"}, id="odd"),
    ],
)
def test_envs_of_each_kind_in_processes_of_their_own_cost_themselves_only(
    tmp_path: Path, kinds: list[str], reasons: set[str]
) -> None:
    env_config = orjson.dumps({"kinds": ["sound", *kinds]}).decode()
    width = len(kinds) + 1
    config = {
        "sampling.env_config": env_config,
        "sampling.env_placement": "process",
        "sampling.env_step_timeout_s": "2.0",
        "sampling.env_restart_attempts": "1000",
        "learner.epochs": "1",
    }
    settings = [word for key, value in config.items() for word in ("--set", f"{key}={value}")]
    arguments = ("--env", "support.envs.fleet:one_of_each_kind", "--workers", "1", "--num-envs", str(width))
    with RunningFleet(
        tmp_path / "run", *arguments, *settings, "--no-check-env", "--until-steps", str(300 * width)
    ) as fleet:
        result = fleet.finish()
    assert (result["returncode"], result["restarts"]["worker"]) == (0, 0), result["stderr"]
    assert reasons <= set(result["ledger"]["discarded"])
    assert result["balanced"] is True
    fleet.audited()
