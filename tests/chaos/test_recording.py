"""A recording while recorder, worker, broker and Redis are killed: each row once, and as many as are committed.

The outside truth is the env's: each of its observations has the number of its life, and rises by one.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow", reason="pyarrow is not installed; pip install 'headrace[record]'")

import numpy as np
import pyarrow.parquet as pq

from headrace.deploy.annexes.recording.recording_folder import numbered
from headrace.learner_stub import EpisodeStream
from support.fleets.group_reader import read_lines
from support.fleets.running_fleet import RunningFleet
from support.waiting import TIMEOUT_S

pytestmark = [pytest.mark.chaos, pytest.mark.thorough]

KILLS = int(os.environ.get("HEADRACE_TEST_KILLS", "20"))
PAUSE_S = 1.5
ENVS = 8
ROOT = Path(__file__).parents[1]
RECORD = """
from headrace.deploy.annexes.recording import compaction, recording_loop
from headrace.deploy.command.cli import main
recording_loop.FLUSH_AGE_S, recording_loop.TEND_S, compaction.MERGE_AGE_S = 0.3, 0.1, 1.0
main()
"""
"""`headrace record` with a file every 0.3 s and a merge every second: a kill then comes amid all that it does."""


class Processes:
    """The recorder and the learner, which start again after each end but that of the fleet."""

    def __init__(self, run_dir: Path, folder: Path, seen: Path) -> None:
        self._commands = {
            "recorder": ["-c", RECORD, "record", str(run_dir), "--dir", str(folder)],
            "learner": ["-m", "support.fleets.group_reader", str(run_dir), "train", str(seen)],
        }
        self.running = {name: self._start(name) for name in self._commands}

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, *self._commands[name]], cwd=ROOT)

    def keep_alive(self) -> None:
        for name, process in self.running.items():
            if process.poll() is not None:
                self.running[name] = self._start(name)

    def kill(self, name: str) -> None:
        self.running[name].kill()
        self.running[name].wait()
        self.keep_alive()

    def stop(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()


def rows_in(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [row for file in sorted(folder.glob(f"{kind}-*.parquet")) for row in pq.read_table(file).to_pylist()]


def check_episodes(steps: list[dict[str, Any]], chunks: list[dict[str, Any]]) -> int:
    """Each episode is one run of its env's observations, and has one end at most. Return the number that ended.

    All have ended but those that were open as the fleet ended, one at most in each env.
    """
    ends: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in chunks:
        if row["end"] != "ONGOING":
            ends[row["episode_id"]].append(row)
    assert max(map(len, ends.values())) == 1, "an episode has ended twice"
    episodes: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in steps:
        episodes[row["episode_id"]].append(row)
    for episode, rows in episodes.items():
        rows.sort(key=lambda row: int(row["t"]))
        lives, counts = np.array([row["obs"] for row in rows]).T
        assert len(set(lives)) == 1
        assert np.array_equal(counts - counts[0], [row["t"] for row in rows]), f"{episode} lacks a step"
        (end,) = ends.get(episode) or (None,)
        if end is not None and end["end"] != "ABORTED":
            assert end["episode_length"] == len(rows) == end["episode_return"]
            assert np.array_equal(end["final_obs"], [lives[0], counts[-1] + 1])
            assert [row["end"] for row in rows] == ["ONGOING"] * (len(rows) - 1) + [end["end"]]
    assert len(episodes.keys() - ends.keys()) <= ENVS
    return len(ends)


def test_rows_on_disk_are_those_committed_whatever_is_killed(tmp_path: Path) -> None:
    draw = random.Random(KILLS)
    roles = (["recorder", "worker", "broker", "recorder", "redis", "learner"] * KILLS)[:KILLS]
    draw.shuffle(roles)
    run_dir, folder, seen = tmp_path / "run", tmp_path / "recording", tmp_path / "train.lines"
    words = (
        "--env",
        "support.envs.counting:Paced",
        "--workers",
        "2",
        "--num-envs",
        str(ENVS // 2),
        "--timeout-s",
        "100000",
    )
    settings = ("broker.consumer_groups.record=wait", "learner.enabled=false", "supervisor.restart_attempts=1000")
    killed: dict[str, int] = defaultdict(int)
    with RunningFleet(run_dir, *words, *(f"--set={one}" for one in settings), cwd=ROOT) as fleet:
        fleet.wait_until(lambda: (run_dir / "broker.json").exists(), "a broker")
        processes = Processes(run_dir, folder, seen)

        def progress() -> tuple[int, int]:
            return max(numbered(folder, "batches"), default=0), seen.stat().st_size if seen.exists() else 0

        def both_go_on() -> bool:
            processes.keep_alive()
            return all(now > before for now, before in zip(progress(), known, strict=True))

        try:
            for number in range(KILLS + 1):
                known = progress()
                fleet.wait_until(both_go_on, "a further file, and a further commit of the learner")
                if number == KILLS:
                    break
                time.sleep(draw.random() * PAUSE_S)
                role = roles[number]
                if role in processes.running:
                    processes.kill(role)
                elif (pid := fleet.pid(role, slot=draw.randrange(2) if role == "worker" else None)) is not None:
                    os.kill(pid, signal.SIGKILL)
                killed[role] += 1
            fleet.terminate()
            result = fleet.finish()
            assert [process.wait(TIMEOUT_S) for process in processes.running.values()] == [0, 0]
        finally:
            processes.stop()
    ledger = fleet.audited()["groups"]["record"]["ledger"]
    steps, chunks = rows_in(folder, "steps"), rows_in(folder, "chunks")
    recorded = {(int(row["obs"][0]), int(row["obs"][1])) for row in steps}
    assert len(recorded) == len(steps), "a step is on the disk twice"
    with EpisodeStream.of(folder) as stream:
        assert sum(batch.steps for batch in stream) == len(steps)
    # The broker may have stopped before the last commit.
    assert 0 <= len(steps) - ledger["committed"][0] <= ledger["queued"], ledger
    dropped = sum(lost for lost, _ in ledger["dropped"].values())
    trained = {(life, count) for line in read_lines(seen) for life, count in line["steps"]}
    assert len(trained - recorded) <= dropped + ledger["queued"], ledger
    ended = check_episodes(steps, chunks)
    assert result["returncode"] == 0
    told = {
        "killed": dict(killed),
        "rows": len(steps),
        "ends": ended,
        "flushes": known[0],
        "files": len(list(folder.glob("batches-*"))),
        "ledger": ledger,
    }
    (tmp_path / "told.json").write_text(json.dumps(told))
