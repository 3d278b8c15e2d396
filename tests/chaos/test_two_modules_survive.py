"""A fleet of two modules whose processes are killed goes on; its books balance, and each agent's episode has an end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path

import orjson
import pytest

from headrace.learner_stub import EpisodeStream
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.errors import HeadraceError
from support.fleets.running_fleet import RunningFleet

pytestmark = pytest.mark.chaos

TWO_CARTS = (
    *("--env", "headrace.workers.agents.examples:two_carts", "--workers", "2", "--num-envs", "4"),
    *("--set", 'sampling.policies={"short": {}, "long": {}}', "--set", "learner.enabled=false"),
    *("--set", "worker.random_actions_before_weights=true"),
)


class Consumer(threading.Thread):
    """A learner that takes every batch at once, and notes which agents' episodes it has not seen the end of."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(daemon=True)
        self.endpoint = endpoint
        self.stop = threading.Event()
        self.open: set[tuple[str, str]] = set()
        self.modules: set[str] = set()
        self.markers: set[str | None] = set()
        self.lives: set[tuple[int, int]] = set()
        """(slot, incarnation) of each worker that has delivered steps."""

    def lives_of(self, slot: int) -> int:
        return sum(place == slot for place, _ in self.lives.copy())

    def run(self) -> None:
        try:
            with EpisodeStream(self.endpoint) as stream:
                while not self.stop.is_set():
                    self._see(stream.next(timeout_s=0.1))
        except HeadraceError:
            return

    def _see(self, batch: ChunkBatch | None) -> None:
        for chunk in batch or ():
            life = (chunk.episode_id, chunk.agent_id)
            assert chunk.module_id == chunk.agent_id
            self.modules.add(chunk.module_id)
            if len(chunk):
                self.lives.add((chunk.slot, chunk.incarnation))
            self.open.add(life)
            if chunk.end is not ChunkEnd.ONGOING:
                self.open.discard(life)
            if chunk.end is ChunkEnd.ABORTED:
                self.markers.add(chunk.end_reason)


@pytest.mark.thorough
@pytest.mark.parametrize(("role", "slot"), [("worker", 0), ("broker", None)])
def test_a_fleet_of_two_modules_survives_kills_of_worker_or_broker(tmp_path: Path, role: str, slot: int | None) -> None:
    with RunningFleet(tmp_path, *TWO_CARTS) as fleet:
        fleet.wait_until(lambda: (tmp_path / "broker.json").exists(), "the broker serves")
        consumer = Consumer(fleet.endpoint("learner"))
        consumer.start()
        for life in range(1, 4):
            before = fleet.steps()
            fleet.wait_until(lambda: fleet.steps() > before + 3_000, "progress")  # noqa: B023 - asked at once
            if role == "worker":
                fleet.wait_until(lambda: consumer.lives_of(0) == life, "steps of the one to be killed")  # noqa: B023
            killed = fleet.send(signal.SIGKILL, role, slot)
            fleet.wait_until(lambda: fleet.pid(role, slot) not in (None, killed), "its next life")  # noqa: B023
        before = fleet.steps()
        fleet.wait_until(lambda: fleet.steps() > before + 10_000, "progress after the last")
        fleet.terminate()
        result = fleet.finish()
        consumer.stop.set()
        consumer.join(10)
    assert (result["returncode"], result["balanced"]) == (0, True), result["stderr"]
    assert result["restarts"][role] == 3
    assert result["steps"] >= 19_000
    assert result["env_steps"] < result["steps"] <= 2 * result["env_steps"]
    audit = fleet.audit()
    assert audit.returncode == 0, audit.stdout + audit.stderr
    assert consumer.modules == {"short", "long"}
    assert not consumer.open, "every worker has left, so that nobody's episode goes on"
    lost = result["ledger"]["dropped"].keys() | result["ledger"]["discarded"].keys()
    assert lost <= ({"worker_killed", "shutdown"} if role == "worker" else {"shutdown"})
    if role == "worker":
        assert "worker_killed" in consumer.markers


RECORD = """
import os, sys
from pathlib import Path
import orjson
from headrace.learner_stub import EpisodeStream

path = Path(sys.argv[2])
whole, _, torn = path.read_bytes().rpartition(b"\\n") if path.exists() else (b"", b"", b"")
if torn:
    os.truncate(path, len(whole) + 1)
position = orjson.loads(whole.splitlines()[-1])["position"] if whole else None
with open(path, "ab", buffering=0) as record, EpisodeStream.of(sys.argv[1], position=position) as stream:
    for batch in stream:
        chunks = [[c.episode_id, c.agent_id, c.chunk_index, c.end.name] for c in batch]
        record.write(orjson.dumps({"chunks": chunks, "position": stream.position()}) + b"\\n")
"""
"""A learner whose record is its memory: chunks and position are written together, and committed with the next batch."""


@pytest.mark.parametrize(
    ("others", "kills"),
    [
        pytest.param(("worker", "broker"), 1, id="worker and broker"),
        pytest.param(("worker", "broker"), 3, id="worker and broker, three times", marks=pytest.mark.thorough),
        pytest.param(("worker",), 3, id="worker, three times", marks=pytest.mark.thorough),
    ],
)
def test_every_episode_has_its_end_after_kills_of_the_learner_and_others_together(
    tmp_path: Path, others: tuple[str, ...], kills: int
) -> None:
    record = tmp_path / "record"

    def start_learner() -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", RECORD, str(tmp_path / "run"), str(record)])

    with RunningFleet(tmp_path / "run", *TWO_CARTS) as fleet:
        learner = start_learner()
        try:
            for _ in range(kills):
                before = record.stat().st_size if record.exists() else 0
                fleet.wait_until(lambda: record.exists() and record.stat().st_size > before + 20_000, "more on record")  # noqa: B023
                pids = {role: fleet.pid(role, 0 if role == "worker" else None) for role in others}
                for pid in (learner.pid, *pids.values()):
                    assert pid is not None
                    os.kill(pid, signal.SIGKILL)
                learner.wait(100)
                learner = start_learner()
                for role, pid in pids.items():
                    slot = 0 if role == "worker" else None
                    fleet.wait_until(lambda: fleet.pid(role, slot) not in (None, pid), f"the next {role}")  # noqa: B023
            before = record.stat().st_size
            fleet.wait_until(lambda: record.stat().st_size > before + 20_000, "progress after the last")
            fleet.terminate()
            result = fleet.finish()
            learner.wait(100)
        finally:
            learner.kill()
            learner.wait(100)
    assert (result["returncode"], result["balanced"]) == (0, True), result["stderr"]
    assert fleet.audit().returncode == 0
    chunks: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for line in record.read_bytes().splitlines():
        for episode, agent, index, end in orjson.loads(line)["chunks"]:
            chunks[f"{episode} {agent}"].append((index, end))
    for name, seen in chunks.items():
        assert [index for index, _ in seen] == list(range(len(seen))), f"{name} is not whole: {seen}"
        assert [end != "ONGOING" for _, end in seen] == [False] * (len(seen) - 1) + [True], f"{name}: {seen}"
    assert "ABORTED" in {end for seen in chunks.values() for _, end in seen}
