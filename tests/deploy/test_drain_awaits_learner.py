"""A drain waits for a learner of one's own that trains on its last batches, and not for one that waits for more."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from headrace.deploy.run.resume import read_told
from headrace.schemas.errors import ExitCode
from support.fleets.long_update import STEPS, long_update
from support.fleets.running_fleet import RunningFleet
from support.waiting import TIMEOUT_S

pytestmark = pytest.mark.processes

OWN = ("--env", "CartPole-v1", "--workers", "1", "--num-envs", "2", "--set", "learner.enabled=false")
GOAL = ("--until-steps", str(STEPS + STEPS // 2))
"""Workers sample that many steps while the learner trains on its first update. The rest is less than another one."""
WAITS = r"waiting for the learner python -m support.fleets.long_update \(pid \d+ on .*\) to commit the batches"
OVER = "the drain waits no longer for the learner "


def fleet_in(run: Path, stop_timeout_s: float, place: str = "--run-dir") -> RunningFleet:
    return RunningFleet(run, *OWN, *GOAL, "--set", f"supervisor.stop_timeout_s={stop_timeout_s}", place=place)


def until_it_waits(fleet: RunningFleet) -> None:
    fleet.wait_until(lambda: re.search(WAITS, fleet.said()), "the drain waits for the learner")


def trained_on(run: Path) -> int:
    """Return the steps that the newest checkpoint was trained on."""
    told = read_told(run / "learner.checkpoint")
    assert told is not None
    return int(told["state"]["steps"])


def test_a_drain_waits_for_a_learner_that_trains_and_ends_once_it_waits_for_batches(tmp_path: Path) -> None:
    run, go = tmp_path / "run", tmp_path / "go"
    with long_update(run, go) as learner, fleet_in(run, 600.0) as fleet:
        until_it_waits(fleet)
        go.write_text("train")
        result = fleet.finish()
        learner.wait(TIMEOUT_S)
        audit = fleet.audit()
    assert (result["returncode"], result["goal_reached"]) == (0, True), result["stderr"]
    assert OVER not in result["stderr"]
    assert result["ledger"]["committed"][0] == trained_on(run) >= STEPS
    assert 0 < result["ledger"]["queued"] < STEPS, "the rest, which fills no update"
    assert audit.returncode == 0, audit.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["is killed", "leaves"])
def test_a_drain_ends_when_the_learner_that_it_waits_for_is_gone(tmp_path: Path, how: str) -> None:
    run, go = tmp_path / "run", tmp_path / "go"
    with long_update(run, go) as learner, fleet_in(run, 600.0) as fleet:
        until_it_waits(fleet)
        if how == "leaves":
            go.write_text("leave")
        else:
            learner.kill()
        result = fleet.finish()
        audit = fleet.audit()
    assert (result["returncode"], result["ledger"]["committed"][0]) == (0, 0), result["stderr"]
    assert OVER not in result["stderr"]
    assert audit.returncode == 0, audit.stderr


@pytest.mark.parametrize("does", ["train", pytest.param("stand still", marks=pytest.mark.thorough)])
def test_the_next_start_takes_what_a_learner_trained_on_for_longer_than_a_drain_may_take(
    tmp_path: Path, does: str
) -> None:
    run, go = tmp_path / "run", tmp_path / "go"
    with long_update(run, go) as learner, fleet_in(run, 6.0) as fleet:
        until_it_waits(fleet)
        if does == "stand still":
            learner.send_signal(signal.SIGSTOP)
        result = fleet.finish()
        learner.send_signal(signal.SIGCONT)
        go.write_text("train")
        learner.wait(TIMEOUT_S)
        audit = fleet.audit()
    assert (result["returncode"], result["balanced"]) == (0, True), result["stderr"]
    assert re.search(f"{OVER}.*: supervisor.stop_timeout_s = 6 s are over", result["stderr"])
    assert result["ledger"]["queued"] > (before := trained_on(run)) >= STEPS
    assert audit.returncode == ExitCode.LEDGER, audit.stdout
    assert "the broker had stopped before the learner committed them: the next `headrace up` in" in audit.stderr

    with long_update(run, go) as learner, fleet_in(run, 600.0, place="--resume") as fleet:
        later = fleet.finish()
        learner.wait(TIMEOUT_S)
        audit = fleet.audit()
    assert (later["returncode"], later["balanced"]) == (0, True), later["stderr"]
    assert later["ledger"]["committed"][0] == trained_on(run) >= before + STEPS
    assert audit.returncode == 0, audit.stderr
