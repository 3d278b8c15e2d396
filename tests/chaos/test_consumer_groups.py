"""A learner, a recorder for which workers wait, and a watcher that loses what is too old, while any process is killed.

The learner is one process, or two ranks that share its batches.

The outside truth is the env's: each of its observations has the number of its life, and rises by one.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.fleets.group_reader import read_lines
from support.fleets.running_fleet import RunningFleet
from support.waiting import TIMEOUT_S

pytestmark = pytest.mark.chaos

GROUPS = {"train": 0.0, "record": 0.0, "watch": 0.01}
"""Each group with the seconds that its reader takes for a batch."""
KILLS = int(os.environ.get("HEADRACE_TEST_KILLS", "12"))
PAUSE_S = 1.2
RANK_ONE = "rank 1"


class Readers:
    """The processes that read, one for each group. With `ranks` the learner has a second one, its rank 1."""

    def __init__(self, run_dir: Path, folder: Path, ranks: str) -> None:
        self._run_dir = run_dir
        self._folder = folder
        self._ranks = ranks
        self.processes = {name: self._start(name) for name in (*GROUPS, *([RANK_ONE] if ranks else ()))}

    def file(self, group: str) -> Path:
        return self._folder / f"{group}.lines"

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        if self._ranks and name in ("train", RANK_ONE):
            rank = str(int(name == RANK_ONE))
            words = ["rank_reader", str(self._run_dir), str(self.file("train")), rank, self._ranks]
        else:
            words = ["group_reader", str(self._run_dir), name, str(self.file(name)), str(GROUPS[name])]
        command = [sys.executable, "-m", f"support.fleets.{words[0]}", *words[1:]]
        return subprocess.Popen(command, cwd=Path(__file__).parents[1])

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait()
        self.keep_alive()

    def keep_alive(self) -> None:
        for name, process in self.processes.items():
            if process.poll() is not None:
                self.processes[name] = self._start(name)

    def are_at_work(self) -> bool:
        self.keep_alive()
        return all(self.file(group).exists() and self.file(group).stat().st_mtime > self.began for group in GROUPS)

    def end(self) -> None:
        for process in self.processes.values():
            process.wait(TIMEOUT_S)

    def stop(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()

    began = 0.0


def steps_of(path: Path) -> list[tuple[int, int]]:
    return [(life, number) for line in read_lines(path) for life, number in line["steps"]]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("ranks", ["shared", "", "fixed"])
def test_each_group_gets_every_step_once_or_counts_it(tmp_path: Path, ranks: str) -> None:
    draw = random.Random(KILLS)
    run_dir = tmp_path / "run"
    groups = '--set=broker.consumer_groups={"record": "wait", "watch": "drop"}'
    arguments = ("--env", "support.envs.counting:Numbered", "--workers", "2", "--num-envs", "4", groups)
    settings = ("--set", "learner.enabled=false", "--set", "supervisor.restart_attempts=1000", "--timeout-s", "100000")
    with RunningFleet(run_dir, *arguments, *settings, cwd=Path(__file__).parents[1]) as fleet:
        fleet.wait_until(lambda: (run_dir / "broker.json").exists(), "a broker")
        readers = Readers(run_dir, tmp_path, ranks)
        try:
            fleet.wait_until(readers.are_at_work, "all groups get batches")
            for _ in range(KILLS):
                time.sleep(draw.uniform(0.5, 1.5) * PAUSE_S)
                role = draw.choice(["worker", "broker", "redis", *readers.processes])
                if role in readers.processes:
                    readers.kill(role)
                elif (pid := fleet.pid(role, slot=draw.randrange(2) if role == "worker" else None)) is not None:
                    os.kill(pid, signal.SIGKILL)
            readers.began = time.time() + 1.0
            fleet.wait_until(readers.are_at_work, "all groups get batches after the last kill")
            fleet.wait_for_steps(2_000)
            fleet.terminate()
            result = fleet.finish()
            readers.end()
        finally:
            readers.stop()
    deep = fleet.deep_audit()
    assert deep.returncode == 0, deep.stdout + deep.stderr
    books = fleet.audited()
    ledgers = {"train": books["ledger"], **{group: told["ledger"] for group, told in books["groups"].items()}}
    seen = {group: steps_of(readers.file(group)) for group in GROUPS}
    for group, steps in seen.items():
        ledger = ledgers[group]
        assert len(set(steps)) == len(steps), f"{group} was given a step twice"
        assert ledger["stepped"] == ledgers["train"]["stepped"]
        # The broker may have stopped before the last commit.
        assert 0 <= len(steps) - ledger["committed"][0] <= ledger["queued"], (group, ledger)
    dropped = {group: ledger["dropped"] for group, ledger in ledgers.items()}
    lacking = set(seen["train"]) - set(seen["record"])
    uncommitted = len(seen["train"]) - ledgers["train"]["committed"][0]
    assert len(lacking) <= sum(steps for steps, _ in dropped["record"].values()) + uncommitted, dropped
    assert set(dropped["record"]) <= {"worker_killed", "broker_lost", "before_group", "gap"}, dropped
    assert result["returncode"] == 0
