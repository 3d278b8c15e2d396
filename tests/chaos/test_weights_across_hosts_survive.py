"""Workers on another machine go on with new weights after the one that pulls for all is killed amid a pull."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import orjson
import pytest

from support.fleets.machines import Machines
from support.fleets.two_machines import NoNamespacesError
from support.waiting import TIMEOUT_S, wait_until

pytestmark = [pytest.mark.netns, pytest.mark.chaos, pytest.mark.thorough]

BITS_PER_S = 40_000_000
"""A pull of 8 MB takes 1.7 s."""
WORKERS = ("--num-envs", "2", "--set", 'module.config={"hidden": [1000, 1000]}', "--set", "broker.lease_s=4")
FLEET = ("--fleet-id", "hosts")

LEARNER = """
import sys
from headrace.learner_stub import EpisodeStream, WeightPublisher
from headrace.workers.modules import actor_critic
with EpisodeStream(sys.argv[1]) as stream, WeightPublisher(sys.argv[1]) as weights:
    module, slots = actor_critic(stream.spaces(), hidden=(1000, 1000)), set()
    newest = weights.publish(module.state_dict())
    for batch in stream:
        if batch.steps and int(batch.columns["weights_seq"].max()) == newest:
            slots.add(batch.slot)
        if len(slots) >= 2:
            print(newest, flush=True)
            newest, slots = weights.publish(module.state_dict()), set()
"""
"""Publish a version, wait until two workers sample with it, print its number, and so on."""


@pytest.fixture
def machines() -> Iterator[Machines]:
    with ExitStack() as stack:
        try:
            yield stack.enter_context(Machines("head", "host"))
        except NoNamespacesError as error:
            pytest.skip(str(error))


class Started:
    """Processes on the machines, each of which has memory of its own for files."""

    def __init__(self, machines: Machines, folder: Path, stack: ExitStack) -> None:
        self._machines, self._folder, self._stack = machines, folder, stack

    def start(self, machine: str, name: str, *command: str) -> subprocess.Popen[bytes]:
        self.memory(machine).mkdir(exist_ok=True)
        mounted = ("sh", "-c", 'mount --bind "$0" /dev/shm && exec "$@"', str(self.memory(machine)))
        with self.log(name).open("wb") as log:
            process = subprocess.Popen(
                self._machines.command(machine, *mounted, sys.executable, *command), stdout=log, stderr=log
            )
        self._stack.callback(process.wait, TIMEOUT_S)
        self._stack.callback(process.terminate)
        return process

    def log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def memory(self, machine: str) -> Path:
        return self._folder / f"memory-{machine}"

    def versions(self) -> int:
        """Return with how many versions two workers have sampled."""
        return sum(line.isdigit() for line in self.log("learner").read_text().splitlines())

    def arriving(self) -> list[Path]:
        """Return the files of versions that come over the link at this moment."""
        return [path for path in self.memory("host").rglob(".*-*.*") if path.stat().st_blocks * 512 > 2_000_000]


def test_workers_take_new_weights_after_the_pulling_one_is_killed(machines: Machines, tmp_path: Path) -> None:
    run_dir, where = tmp_path / "run", (f"broker.host={machines.address('head')}", "broker.allow_insecure=true")
    machines.limit("host", BITS_PER_S)
    with ExitStack() as stack:
        started = Started(machines, tmp_path, stack)
        sets = [part for setting in where for part in ("--set", setting)]
        started.start("head", "broker", "-m", "headrace.deploy", "broker", *FLEET, "--run-dir", str(run_dir), *sets)
        wait_until((run_dir / "broker.json").exists, "the broker's start")
        endpoints = orjson.loads((run_dir / "broker.json").read_bytes())["endpoints"]
        join = ("-m", "headrace.deploy", "worker", *FLEET, "--endpoint", endpoints["worker"], "--count", "3", *WORKERS)
        started.start("host", "workers", *join, "--run-dir", str(tmp_path / "workers"))
        started.start("head", "learner", "-c", LEARNER, endpoints["learner"])
        wait_until(lambda: started.versions() >= 2, "two versions at the workers")
        for _ in range(2):
            (half,) = wait_until(started.arriving, "a pull")
            before = started.versions()
            os.kill(int(half.name.rpartition(".")[2]), signal.SIGKILL)
            wait_until(lambda n=before: started.versions() >= n + 2, "newer weights")  # type: ignore[misc]
            assert not half.exists()
