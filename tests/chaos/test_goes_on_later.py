"""A process that stood still goes on, and a fleet names the batches that an earlier one left in its run directory."""

from __future__ import annotations

import shutil
import signal
import threading
from pathlib import Path

import orjson
import pytest

from headrace.deploy.run.resume import read_told
from headrace.schemas.errors import ExitCode
from headrace.schemas.settings.config import FleetConfig
from support.fleets.running_fleet import RunningFleet

pytestmark = pytest.mark.chaos

SETTINGS = ("broker.lease_s=1.5", "learner.epochs=1")
SMALL = ("--workers", "2", "--num-envs", "8", *(word for setting in SETTINGS for word in ("--set", setting)))
HANG_S = 1.0
"""Less than a lease. A process that stands still for longer is replaced."""


@pytest.mark.thorough
@pytest.mark.parametrize("role", ["broker", "learner"])
def test_a_process_that_hangs_for_less_than_its_lease_loses_no_batch(tmp_path: Path, role: str) -> None:
    with RunningFleet(tmp_path, *SMALL, "--until-steps", "60000") as fleet:
        fleet.wait_until(lambda: fleet.steps() > 3_000, "training has begun")
        fleet.send(signal.SIGSTOP, role)
        threading.Event().wait(HANG_S)
        before = fleet.steps()
        fleet.send(signal.SIGCONT, role)
        fleet.wait_until(lambda: fleet.steps() > before + 5_000, "the fleet goes on")
        result = fleet.finish()
    assert (result["returncode"], result["goal_reached"], result["balanced"]) == (0, True, True), result["stderr"]
    assert (result["ledger"]["dropped"], result["ledger"]["queued"]) == ({}, 0)
    assert fleet.audit().returncode == 0


@pytest.mark.thorough
def test_the_next_fleet_reports_batches_that_no_learner_took_as_dropped_by_shutdown(tmp_path: Path) -> None:
    alone = ("--set", "learner.enabled=false", "--set", "worker.random_actions_before_weights=true")
    with RunningFleet(tmp_path, *SMALL, *alone, "--until-steps", "4000") as fleet:
        first = fleet.finish()
    assert first["balanced"] is True
    queued = first["ledger"]["queued"]
    assert queued == first["ledger"]["stepped"] > 0
    assert list((tmp_path / "recorders").iterdir()), "of each worker that has sampled before all was"
    with RunningFleet(tmp_path, *SMALL, "--until-steps", "20000") as fleet:
        second = fleet.finish()
    assert second["ledger"]["queued"] == 0, "nobody has those batches any more"
    assert {reason: steps for reason, (steps, _) in second["ledger"]["dropped"].items()} == {"shutdown": queued}
    assert list((tmp_path / "recorders").iterdir()) == []
    audit = fleet.audit()
    assert audit.returncode == 0, audit.stdout + audit.stderr


@pytest.mark.parametrize(
    "how",
    ["the folder", *(pytest.param(how, marks=pytest.mark.thorough) for how in ("the files", "and all is killed"))],
)
def test_removed_recorders_are_named_by_the_deep_audit_and_the_books_are_whole(tmp_path: Path, how: str) -> None:
    run = tmp_path / "run"
    with RunningFleet(run, *SMALL) as fleet:
        fleet.wait_for_steps(2_000)
        if how == "the files":
            for path in (run / "recorders").iterdir():
                path.unlink()
            fleet.send(signal.SIGKILL, "worker", slot=0)
            fleet.wait_for_steps(2_000)
            fleet.terminate()
        else:
            shutil.rmtree(run / "recorders")
        if how == "and all is killed":
            fleet.kill_everything()
        else:
            result = fleet.finish()
            assert result["returncode"] == (0 if how == "the files" else ExitCode.RUN_DIR), result["stderr"]
            assert result["balanced"], result
    with RunningFleet(run, *SMALL, "--until-steps", "3000", place="--resume") as fleet:
        result = fleet.finish()
    assert (result["returncode"], result["balanced"]) == (0, True), f"{result['stderr']}\n{result}"
    assert fleet.audit().returncode == 0
    deep = fleet.deep_audit()
    assert deep.returncode == 0, deep.stdout + deep.stderr
    assert "slot 0 incarnation 1: its recorder was lost, so the ledger has " in deep.stdout


CHANGES: dict[str, list[tuple[str, ...]]] = {
    "overflow": [("broker.overflow=drop_oldest",), (), ("broker.overflow=drop_stale", "broker.max_staleness=1")],
    "staleness": [(), ("broker.max_staleness=1",), ()],
    "synchronous": [("sampling.synchronous=true",), (), ("sampling.synchronous=true",)],
    "transport": [(), ("broker.host=127.0.0.1", "broker.allow_insecure=true"), ()],
    "placement": [
        (),
        ("sampling.env_placement=process",),
        ("sampling.env_placement=remote", "fleet.env_hosts=2"),
        ("sampling.env_placement=inline", "fleet.env_hosts=0"),
    ],
    "batch mode": [
        ("sampling.batch_mode=complete_episodes",),
        ("sampling.batch_mode=truncate_episodes",),
        ("sampling.batch_mode=complete_episodes",),
    ],
    "length of fragments": [
        ("sampling.rollout_fragment_length=8",),
        ("sampling.rollout_fragment_length=200",),
        ("sampling.rollout_fragment_length=8",),
    ],
    "compression": [("worker.compression=none",), ("worker.compression=lz4",), ("worker.compression=none",)],
    "envs": [("sampling.num_envs=8",), ("sampling.num_envs=1",), ("sampling.num_envs=16",)],
    "workers": [("fleet.workers=3",), ("fleet.workers=1",), ("fleet.workers=2",)],
    "sizes": [
        ("broker.max_batch_bytes=65536", "worker.window_batches=2"),
        (),
        ("broker.max_held_bytes=1048576", "broker.max_batch_bytes=65536", "broker.max_held_batches=64"),
    ],
    "size of an update": [("learner.steps_per_update=4096",), ("learner.steps_per_update=64",), ()],
}
"""The settings of each life of a run, one after the other. A setting that a life does not name has its default."""


@pytest.mark.parametrize("change", [pytest.param(name, marks=pytest.mark.thorough) for name in CHANGES])
def test_settings_may_change_between_lives_while_batches_are_in_flight(tmp_path: Path, change: str) -> None:
    """Everything is killed each time."""
    *killed, last = CHANGES[change]
    named = {words.partition("=")[0] for life in CHANGES[change] for words in life}
    before = {key: f"{key}={_shown(FleetConfig().value_of(key))}" for key in named}
    before |= {words.partition("=")[0]: words for words in ("fleet.workers=2", "sampling.num_envs=8", *SETTINGS)}
    run = tmp_path / "run"

    def life(number: int, settings: tuple[str, ...], *goal: str) -> RunningFleet:
        own = {words.partition("=")[0]: words for words in settings}
        sets = [word for setting in (before | own).values() for word in ("--set", setting)]
        return RunningFleet(run, *sets, *goal, place="--resume" if number else "--run-dir")

    for number, settings in enumerate(killed):
        with life(number, settings) as fleet:
            fleet.wait_until(lambda: "first env steps" in fleet.said(), "its own first steps")
            fleet.wait_for_steps(1_500)
            fleet.kill_everything()
    with life(len(killed), last, "--until-steps", "4000") as fleet:
        result = fleet.finish()
    said = result["stderr"]
    assert (result["returncode"], result["goal_reached"], result["balanced"]) == (0, True, True), f"{said}\n{result}"
    assert result["ledger"]["queued"] == 0, said
    assert (audit := fleet.audit()).returncode == 0, audit.stdout + audit.stderr
    assert (deep := fleet.deep_audit()).returncode == 0, deep.stdout + deep.stderr
    told = read_told(run / "learner.checkpoint")
    assert told is not None
    assert told["state"]["steps"] == result["ledger"]["committed"][0], "each committed step is trained on, and once"


def _shown(value: object) -> str:
    return value if isinstance(value, str) else orjson.dumps(value).decode()


def test_the_next_supervisor_closes_the_books_of_a_killed_supervisor(tmp_path: Path) -> None:
    with RunningFleet(tmp_path, *SMALL) as fleet:
        fleet.wait_until(lambda: fleet.steps() > 5_000, "training has begun")
        reached = fleet.steps()
        fleet.kill()
    with RunningFleet(tmp_path, *SMALL, "--until-steps", str(reached + 5_000)) as fleet:
        result = fleet.finish()
    assert (result["returncode"], result["balanced"]) == (0, True), result["stderr"]
    assert result["ledger"]["queued"] == 0
    assert list((tmp_path / "recorders").iterdir()) == []
    audit = fleet.audit()
    assert audit.returncode == 0, audit.stdout + audit.stderr
