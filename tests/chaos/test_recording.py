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
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow", reason="pyarrow is not installed; pip install 'headrace[record]'")

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from headrace.deploy.annexes.recording.recording_folder import numbered
from headrace.learner_stub import EpisodeStream
from support.fleets.group_reader import read_lines
from support.fleets.running_fleet import RunningFleet
from support.waiting import TIMEOUT_S, wait_until

pytestmark = [pytest.mark.chaos, pytest.mark.thorough]

KILLS = int(os.environ.get("HEADRACE_TEST_KILLS", "20"))
STEPS = int(os.environ.get("HEADRACE_TEST_STEPS", "0"))
"""Steps over which the kills are spread, as fast as they can be made. 0: 1,000 a second, a kill every few seconds."""
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


class Rows:
    """The merged rows of a kind: plain columns as arrays, words as codes of `words`, which both kinds share."""

    def __init__(self, folder: Path, kind: str, columns: Sequence[str], words: dict[Any, int]) -> None:
        files = sorted(folder.glob(f"{kind}-*.parquet"))
        table = pa.concat_tables([pq.read_table(file, columns=[*columns]) for file in files]).unify_dictionaries()
        self.size = table.num_rows
        self.columns: dict[str, Any] = {}
        for name in columns:
            column = table[name].combine_chunks()
            if pa.types.is_dictionary(column.type):
                codes = np.array([words.setdefault(word, len(words)) for word in column.dictionary.to_pylist()])
                self.columns[name] = codes[column.indices.to_numpy()]
            elif pa.types.is_fixed_size_list(column.type):
                self.columns[name] = column.flatten().to_numpy().astype(np.int64).reshape(-1, 2)
                self.columns[f"has_{name}"] = column.is_valid().to_numpy(zero_copy_only=False)
            else:
                self.columns[name] = column.to_numpy()

    def __getitem__(self, name: str) -> Any:
        return self.columns[name]


def check_episodes(steps: Rows, chunks: Rows, words: dict[Any, int]) -> int:
    """Each episode is one run of its env's observations, and has one end at most. Return the number that ended.

    All have ended but those that were open as the fleet ended, one at most in each env.
    """
    order = np.lexsort((steps["t"], steps["episode_id"]))
    (life, count), t = steps["obs"][order].T, steps["t"][order]
    episodes, first, lengths = np.unique(steps["episode_id"][order], return_index=True, return_counts=True)
    start = np.repeat(first, lengths)
    assert np.array_equal(t, np.arange(steps.size) - start), "an episode lacks a step"
    assert np.array_equal(count - count[start], t), "an episode has the steps of two"
    assert np.array_equal(life, life[start])
    is_end = chunks["end"] != words["ONGOING"]
    ended, how = chunks["episode_id"][is_end], chunks["end"][is_end]
    assert len(np.unique(ended)) == len(ended), "an episode has ended twice"
    assert len(np.setdiff1d(episodes, ended)) <= ENVS, "an episode lacks its end"
    last = (first + lengths - 1)[at := np.searchsorted(episodes, ended[whole := how != words["ABORTED"]])]
    assert np.array_equal(episodes[at], ended[whole])
    for name in ("episode_length", "episode_return"):
        assert np.array_equal(chunks[name][is_end][whole], lengths[at])
    final = np.empty((chunks.size, 2), np.int64)
    final[chunks["has_final_obs"]] = chunks["final_obs"]
    assert np.array_equal(final[is_end][whole], np.stack((life[last], count[last] + 1), axis=1))
    expected = np.full(steps.size, words["ONGOING"])
    expected[last] = how[whole]
    of_whole = np.isin(steps["episode_id"][order], ended[whole])
    assert np.array_equal(steps["end"][order][of_whole], expected[of_whole])
    return len(ended)


def lacking(*observed: Any) -> int:
    """How many observations of the envs are in none of these arrays, of those before a life's last one in them."""
    lives, counts = np.unique(np.concatenate(observed), axis=0).T
    return int(sum(counts[lives == life].max() for life in np.unique(lives)) - len(counts))


def test_rows_on_disk_are_those_committed_whatever_is_killed(tmp_path: Path) -> None:
    draw = random.Random(KILLS)
    roles = (["recorder", "worker", "broker", "merge", "redis", "learner"] * KILLS)[:KILLS]
    draw.shuffle(roles)
    run_dir, folder, seen = tmp_path / "run", tmp_path / "recording", tmp_path / "train.lines"
    words = (
        "--env",
        "support.envs.counting:Numbered" if STEPS else "support.envs.counting:Paced",
        "--workers",
        "2",
        "--num-envs",
        str(ENVS // 2),
        "--timeout-s",
        "100000",
    )
    settings = ("broker.consumer_groups.record=wait", "learner.enabled=false", "supervisor.restart_attempts=1000")
    killed: Counter[str] = Counter()
    began = time.monotonic()
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
                due = STEPS * (number + 1) // (KILLS + 1)
                fleet.wait_until(lambda due=due: both_go_on() and fleet.steps() >= due, f"{due:,} steps")
                if number == KILLS:
                    break
                time.sleep(draw.random() * PAUSE_S)
                role = roles[number]
                if role == "merge":
                    wait_until(lambda: [*folder.glob(".*.parquet.*")], "a merge", pause_s=0.0)
                if role in ("recorder", "merge", "learner"):
                    processes.kill("recorder" if role == "merge" else role)
                elif (pid := fleet.pid(role, slot=draw.randrange(2) if role == "worker" else None)) is not None:
                    os.kill(pid, signal.SIGKILL)
                killed[role] += 1
            fleet.terminate()
            result = fleet.finish()
            assert [process.wait(TIMEOUT_S) for process in processes.running.values()] == [0, 0]
        finally:
            processes.stop()
    ledger = fleet.audited()["groups"]["record"]["ledger"]
    words: dict[Any, int] = {"ONGOING": 0, "ABORTED": 1}
    steps = Rows(folder, "steps", ("episode_id", "t", "end", "obs"), words)
    chunks = Rows(folder, "chunks", ("episode_id", "end", "episode_length", "episode_return", "final_obs"), words)
    recorded = np.unique(steps["obs"], axis=0)
    assert len(recorded) == steps.size, "a step is on the disk twice"
    with EpisodeStream.of(folder) as stream:
        assert sum(batch.steps for batch in stream) == steps.size
    # The broker may have stopped before the last commit.
    assert 0 <= steps.size - ledger["committed"][0] <= ledger["queued"], ledger
    dropped = sum(lost for lost, _ in ledger["dropped"].values())
    trained = np.array([step for line in read_lines(seen) for step in line["steps"]])
    not_recorded = len(np.unique(np.concatenate((recorded, trained)), axis=0)) - len(recorded)
    assert not_recorded <= dropped + ledger["queued"], ledger
    missing = lacking(recorded, chunks["final_obs"])
    assert missing <= dropped, ledger
    ended = check_episodes(steps, chunks, words)
    assert result["returncode"] == 0
    assert sum(killed.values()) == KILLS
    told = {
        "killed": dict(killed),
        "rows": steps.size,
        "trained": len(trained),
        "not_recorded": not_recorded,
        "missing": missing,
        "ends": ended,
        "lives": len(np.unique(recorded[:, 0])),
        "numbers": known[0],
        "seconds": time.monotonic() - began,
        "files": len(list(folder.glob("batches-*"))),
        "ledger": ledger,
    }
    (tmp_path / "told.json").write_text(json.dumps(told))
