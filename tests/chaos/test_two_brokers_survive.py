"""Two brokers and one learner: each process is killed once, and the books of both brokers are exact at the end."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from headrace.deploy.run.redis_server import prepare_redis, wait_ready
from headrace.deploy.run.redis_view import FleetView
from headrace.learner_stub.checkpoints.checkpoint import CHECKPOINT_FILE, load_checkpoint
from headrace.schemas.accounts.ledger import add_up
from support.waiting import TIMEOUT_S, wait_until

SETTINGS = """\
[fleet]
fleet_id = "pair"
run_dir = "{run}"
[broker]
count = 2
lease_s = 3.0
[redis]
url = "{url}"
[sampling]
num_envs = 4
rollout_fragment_length = 16
[learner]
steps_per_update = 256
epochs = 1
"""


class Roles:
    """Processes of the fleet by name, each started by its own command."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self._stack = stack
        redis = prepare_redis(folder)
        self._run(redis.argv)
        wait_ready(redis.url)
        self.views = [stack.enter_context(FleetView(redis.url, f"pair.{index}")) for index in range(2)]
        (folder / "fleet.toml").write_text(SETTINGS.format(run=folder / "run", url=redis.url))

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        return self._run([sys.executable, "-m", "headrace.deploy", *arguments, "--config", "fleet.toml"])

    def broker(self, index: int) -> subprocess.Popen[bytes]:
        return self.start("broker", "--set", f"broker.index={index}")

    def committed(self, index: int) -> int:
        return sum(row.settled.committed[0] for row in self.views[index].read().rows.values())

    def queued(self, index: int) -> int:
        return add_up(self.views[index].read().rows).queued

    def await_growth(self, what: str, *indices: int) -> None:
        before = {index: self.committed(index) for index in indices}
        wait_until(lambda: all(self.committed(i) > n + 1000 for i, n in before.items()), what, pause_s=0.5)

    def audit(self) -> str:
        """Return what is wrong with the books of the brokers."""
        command = [sys.executable, "-m", "headrace.deploy", "audit", "--strict", "--config", "fleet.toml"]
        told = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        return "" if told.returncode == 0 else told.stdout + told.stderr

    def said(self) -> str:
        return (self.folder / "words").read_text()[-4000:]

    def _run(self, command: list[str]) -> subprocess.Popen[bytes]:
        with (self.folder / "words").open("ab") as words:
            process = subprocess.Popen(command, cwd=self.folder, stdout=words, stderr=words)
        self._stack.callback(end, process, signal.SIGKILL)
        return process


def end(process: subprocess.Popen[bytes], how: int = signal.SIGTERM) -> int:
    process.send_signal(how)
    return process.wait(TIMEOUT_S)


@contextmanager
def roles(folder: Path) -> Iterator[Roles]:
    with ExitStack() as stack:
        yield Roles(folder, stack)


@pytest.mark.thorough
@pytest.mark.chaos
@pytest.mark.slow
def test_a_killed_broker_stops_only_its_own_share_and_no_step_counts_twice(tmp_path: Path) -> None:
    with roles(tmp_path) as fleet:
        learner = fleet.start("learner")
        workers = [fleet.start("worker", "--slot", str(slot)) for slot in range(2)]
        brokers = [fleet.broker(index) for index in range(2)]
        fleet.await_growth("both shares to be trained on", 0, 1)

        end(brokers[1], signal.SIGKILL)
        fleet.await_growth("the share of broker 0, without the other", 0)
        brokers[1] = fleet.broker(1)
        fleet.await_growth("the share of broker 1, which is back", 1)

        end(learner, signal.SIGKILL)
        learner = fleet.start("learner")
        wait_until(lambda: "going on from" in fleet.said(), "a new learner")
        fleet.await_growth("both shares, at a new learner", 0, 1)

        assert [end(worker) for worker in workers] == [0, 0], fleet.said()
        assert end(learner) == 0, fleet.said()
        wait_until(lambda: not any(map(fleet.queued, range(2))), "nothing to be queued", pause_s=0.5)
        assert fleet.audit() == ""
        assert [end(broker) for broker in brokers] == [0, 0], fleet.said()

    saved = load_checkpoint(tmp_path / "run" / CHECKPOINT_FILE)
    assert saved is not None
    places = {(place["fleet_id"], place["slot"]): place["settled"]["committed"][0] for place in saved.position}
    assert places.keys() == {("pair.0", 0), ("pair.1", 1)}
    assert saved.state["steps"] == sum(places.values())
