"""`headrace chaos` plays each fault once on a real fleet and finds no problem. It does find falsified books."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from headrace.broker.redis.client import connect
from headrace.deploy.annexes.chaos.checks import judge
from headrace.deploy.annexes.chaos.processes import Folders
from headrace.deploy.annexes.chaos.recorder import RECORD
from headrace.deploy.annexes.chaos.schedule import ELSEWHERE, Event, Kind, Plan, read_plan
from headrace.deploy.annexes.chaos.trial import TrialResult
from headrace.deploy.report.audit import find_books
from headrace.deploy.run.redis_server import serving
from headrace.schemas.errors import ExitCode
from support.waiting import TIMEOUT_S

pytestmark = [pytest.mark.chaos, pytest.mark.thorough]

NUM_ENVS = 4
FAULTS: tuple[dict[str, Any], ...] = (
    {"kind": Kind.KILL, "targets": ("learner",)},
    {"kind": Kind.FLUSH},
    {"kind": Kind.REPLACE},
    {"kind": Kind.FULL, "seconds": 1.0},
    {"kind": Kind.READ_ONLY, "seconds": 1.0},
    {"kind": Kind.KILL, "targets": ("worker-0",)},
    {"kind": Kind.STOP, "targets": ("worker-1",), "seconds": 4.0},
    {"kind": Kind.KILL, "targets": ("broker", "redis")},
    {"kind": Kind.KILL, "targets": (ELSEWHERE,)},
    {"kind": Kind.CUT, "targets": (ELSEWHERE,), "seconds": 1.0},
    {"kind": Kind.STALL, "targets": ("learner",), "seconds": 1.0},
    {"kind": Kind.SLOW, "seconds": 1.0},
    {"kind": Kind.ENV, "detail": "exception"},
    {"kind": Kind.ENV, "detail": "bad-data"},
    {"kind": Kind.ENV, "detail": "segfault"},
    {"kind": Kind.KILL, "targets": ("learner", "worker-0")},
    {"kind": Kind.KILL, "targets": ("broker", "learner", "worker-1")},
    {"kind": Kind.KILL, "targets": ("learner", "supervisor")},
)
"""Few faults need a process that one just before has killed, so none is skipped on a slow machine: each waits 10 s."""
GAP_S = 2.0


def headrace_chaos(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headrace.deploy", "chaos", "--json", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=3 * TIMEOUT_S)


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The folder of a trial with all of `FAULTS`, and how the command ended."""
    folder = tmp_path_factory.mktemp("chaos")
    events = tuple(Event(at_s=2.0 + GAP_S * number, **fault) for number, fault in enumerate(FAULTS))
    plan = Plan(seed=3, minutes=(GAP_S * len(FAULTS) + 8.0) / 60.0, workers=2, lease_s=2.0, events=events)
    (folder / "plan.json").write_bytes(plan.as_json())
    arguments = ("--plan", str(folder / "plan.json"), "--run-dir", str(folder / "trial"))
    settings = ("--num-envs", str(NUM_ENVS), "--set", "broker.lease_s=2")
    return folder / "trial", headrace_chaos(*arguments, *settings)


def test_the_fleet_survives_each_fault_and_keeps_promises(trial: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = trial
    assert done.returncode == ExitCode.OK, done.stderr
    assert "time to the next new step" in done.stderr
    report = orjson.loads(done.stdout)
    assert report["held"] is True
    assert report["problems"] == []
    assert report["steps"]["true"] - report["steps"]["ledger"] == report["steps"]["unfinished_poll"]
    assert report["steps"]["recorded"] > 10_000
    assert not any(event["skipped"] for event in report["events"])
    assert all(event["recovery_s"] is not None for event in report["events"])
    assert orjson.loads((folder / "report.json").read_bytes()) == report


def drop_a_true_step(folders: Folders) -> None:
    """One byte less in the newest file of an env: a step in the books that no env took."""
    newest = max(
        (path for path in folders.truth.glob("*.steps") if path.stat().st_size), key=lambda p: p.stat().st_mtime
    )
    with newest.open("r+b") as file:
        file.truncate(newest.stat().st_size - 1)


def repeat_a_batch(folders: Folders) -> None:
    lines = (folders.record / RECORD).read_bytes().splitlines(keepends=True)
    (folders.record / RECORD).write_bytes(b"".join((*lines, lines[-1])))


def lose_a_batch(folders: Folders) -> None:
    lines = (folders.record / RECORD).read_bytes().splitlines(keepends=True)
    (folders.record / RECORD).write_bytes(b"".join(lines[: len(lines) // 2] + lines[len(lines) // 2 + 1 :]))


def forget_a_life(folders: Folders) -> None:
    """A life is missing in Redis, as if its recorder had been deleted before anyone had read it."""
    url, fleet_id = find_books(folders.fleet)
    with serving(folders.fleet, url):
        client = connect(url)
        key = f"headrace:{{{fleet_id}}}:ledger"
        assert client.hdel(key, min(client.hkeys(key))) == 1
        client.close()


@pytest.mark.parametrize("falsify", [drop_a_true_step, repeat_a_batch, lose_a_batch, forget_a_life])
def test_the_judge_finds_falsified_books_and_records(
    tmp_path: Path,
    trial: tuple[Path, subprocess.CompletedProcess[str]],
    falsify: Callable[[Folders], None],
) -> None:
    folder, done = trial
    folders = Folders(tmp_path / "trial")
    shutil.copytree(folder, folders.root)
    drained = {(life["slot"], life["incarnation"]) for life in orjson.loads(done.stdout)["drained"]}
    outcome = TrialResult(read_plan(folders.root / "plan.json"), folders, NUM_ENVS, living=drained)
    assert judge(outcome).problems == []
    falsify(folders)
    assert judge(outcome).problems


def test_a_second_trial_in_the_same_folder_is_refused(trial: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    again = headrace_chaos("--minutes", "1", "--run-dir", str(trial[0]))
    assert again.returncode == ExitCode.RUN_DIR
    assert "a trial was run in it" in again.stderr
