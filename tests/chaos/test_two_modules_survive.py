"""A fleet of two modules whose processes are killed goes on; its books balance, and each agent's episode has an end."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest

from headrace.learner_stub import EpisodeStream
from headrace.schemas.batch import ChunkBatch
from headrace.schemas.chunk import ChunkEnd
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


@pytest.mark.parametrize(("role", "slot"), [("worker", 0), ("broker", None)])
def test_a_kill_costs_two_modules_no_more_than_one(tmp_path: Path, role: str, slot: int | None) -> None:
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
    assert result["env_steps"] >= 19_000
    assert result["env_steps"] < result["steps"] <= 2 * result["env_steps"]
    audit = fleet.audit()
    assert audit.returncode == 0, audit.stdout + audit.stderr
    assert consumer.modules == {"short", "long"}
    assert not consumer.open, "every worker has left, so that nobody's episode goes on"
    lost = result["ledger"]["dropped"].keys() | result["ledger"]["discarded"].keys()
    assert lost <= ({"worker_killed", "shutdown"} if role == "worker" else {"shutdown"})
    if role == "worker":
        assert "worker_killed" in consumer.markers
